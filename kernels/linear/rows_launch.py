"""How the product of several rows is launched: safe defaults, and what `kernels.tuning` knows better.

What decides in which order a row's products are summed depends on the weight's sizes and the device only, never on the
rows of the step: into how many parts the inputs are cut, and where. Tiles of outputs, warps and stages change no bit.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from functools import lru_cache

import torch

from kernels.buckets import ceil_div, check_power_of_two, round_up
from kernels.linear.counters import MAX_COUNTERS
from kernels.tuning import tuned

MAX_ROWS = 64  # that the kernel takes
MIN_ROWS = 16  # of a tile: the fewest columns of a tensor core product that Triton makes
PRODUCT_ROWS = 64  # of a tensor core product: a tile's outputs, or the rows of x
WIDE = 16384  # outputs of a weight that are enough tiles for all multiprocessors
# Inputs of a part: a part is written, and read by another program.
MIN_PART = 256
MAX_PARTS = 8
# Of a multiprocessor of an H100 and H200, for all its programs, and what each takes beside its tiles.
SHARED_BYTES, OWN_BYTES = 228 << 10, 2 << 10
MAX_STAGES = 8


@dataclass(frozen=True, slots=True)
class RowsLaunch:
    """Launch parameters for one weight."""

    block_out: int  # outputs of a tile
    block_in: int  # inputs of a step
    programs: int  # on each multiprocessor at a time; the inputs are cut so that there is work for all
    most_rows: int  # more rows are torch's, which is faster for them; 1: all are

    def __post_init__(self) -> None:
        check_power_of_two("block_out", self.block_out, 16, 256)
        check_power_of_two("block_in", self.block_in, 16, 512)
        if not 1 <= self.programs <= 4:
            raise ValueError(f"programs is {self.programs}, want 1 to 4 on each multiprocessor")
        if not 1 <= self.most_rows <= MAX_ROWS:
            raise ValueError(f"most_rows is {self.most_rows}, want 1 to {MAX_ROWS}")

    @classmethod
    def default(cls, sizes: Sizes) -> RowsLaunch:
        """Parameters for a weight where nothing was measured; see benchmarks/LOG.md, 2026-11-27.

        Many outputs are enough tiles for all multiprocessors. Few outputs of many inputs are cut in parts. Of few of
        both the parts cost more than they bring, so they are torch's. What a table may say for them, narrower tiles
        that need no parts and read the rows of x more often, was not measured.
        """
        if sizes.num_out >= WIDE:
            return cls(block_out=64, block_in=128, programs=2, most_rows=MAX_ROWS)
        if sizes.num_in >= WIDE // 2:
            return cls(block_out=64, block_in=256, programs=1, most_rows=MAX_ROWS)
        return cls(block_out=32, block_in=256, programs=1, most_rows=1)


@dataclass(frozen=True, slots=True)
class Sizes:
    """What a launch is chosen by. Its fields name the buckets of the tables."""

    dtype: str
    num_in: int
    num_out: int


@dataclass(frozen=True, slots=True)
class RowsGrid:
    """A launch for a number of rows."""

    num_tiles: int
    num_parts: int
    part_values: int  # of the sums of all parts
    block_rows: int
    num_warps: int
    num_stages: int


# Cached, as is the grid: a step needs both in each of its linears.
@lru_cache(maxsize=1024)
def launch_of(device_name: str | None, dtype: torch.dtype, num_in: int, num_out: int) -> RowsLaunch:
    """What was measured for such a weight on the device, or the default."""
    sizes = Sizes(str(dtype).removeprefix("torch."), num_in, num_out)
    return tuned("linear_rows", RowsLaunch.default(sizes), device_name, **asdict(sizes))


@lru_cache(maxsize=4096)
def grid_of(
    launch: RowsLaunch, num_multiprocessors: int, dtype: torch.dtype, num_in: int, num_out: int, num_rows: int
) -> RowsGrid:
    """The launch with these parameters."""
    block_rows = max(MIN_ROWS, round_up(num_rows)) if launch.block_out >= PRODUCT_ROWS else PRODUCT_ROWS
    num_tiles = ceil_div(num_out, launch.block_out)
    wanted = num_multiprocessors * launch.programs // num_tiles
    num_parts = max(1, min(wanted, MAX_PARTS, num_in // MIN_PART)) if num_tiles <= MAX_COUNTERS else 1
    step_bytes = (launch.block_out + block_rows) * launch.block_in * dtype.itemsize
    return RowsGrid(
        num_tiles=num_tiles,
        num_parts=num_parts,
        part_values=num_tiles * num_parts * block_rows * launch.block_out,
        block_rows=block_rows,
        # A thread keeps at most 64 sums in registers.
        num_warps=max(4, launch.block_out * block_rows // 2048),
        num_stages=max(1, min(MAX_STAGES, (SHARED_BYTES // launch.programs - OWN_BYTES) // step_bytes)),
    )
