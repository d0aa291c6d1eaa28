"""How the shrink and expand kernels are launched: safe defaults, and what `kernels.tuning` knows better.

Nothing here changes a bit of any result: sums are cut at multiples of MAX_IN_COLUMNS whatever the tiles are.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from functools import lru_cache

import torch

from kernels.buckets import check_power_of_two, round_up
from kernels.lora.layout import GroupSizes, ModuleGroup
from kernels.tuning import tuned

MIN_RANKS = 16  # of a shrink program: the fewest columns of a tensor core product
MAX_IN_COLUMNS = 128
PART_COLUMNS = 512  # the least that is worth a program of its own
MAX_PARTS = 16
# Of an expand, if each takes more than one step: six for each multiprocessor of an H100.
FEWEST_PROGRAMS = 768
MAX_STEPS = 8


@dataclass(frozen=True, slots=True)
class ShrinkLaunch:
    """Launch parameters of one shrink program."""

    ranks: int  # that it computes
    in_columns: int  # of one of its steps
    num_warps: int = 4
    num_stages: int = 3

    def __post_init__(self) -> None:
        check_power_of_two("ranks", self.ranks, MIN_RANKS, 128)
        check_power_of_two("in_columns", self.in_columns, 16, MAX_IN_COLUMNS)
        check_power_of_two("num_warps", self.num_warps, 1, 16)
        _check_num_stages(self.num_stages)

    @classmethod
    def default(cls, width: int, page: int, dtype: str) -> ShrinkLaunch:
        """Parameters for ranks up to `width` and pages of `page` columns, where nothing was measured.

        Tiles that are on their way beside the one in use: three, which with it are a part of PART_COLUMNS. Of float32
        values two: three of the largest take more than the 99 KiB of shared memory that sm_89 has. The fewest ranks
        keep two warps busy: on an H100 these took 8.5 to 16.3 us where four took 10.5 to 18.4.
        """
        ranks = min(64, max(MIN_RANKS, round_up(width)))
        return cls(
            ranks,
            _page_columns(page),
            num_warps=2 if ranks == MIN_RANKS else 4,
            num_stages=3 if dtype == "float32" else 4,
        )


@dataclass(frozen=True, slots=True)
class ExpandLaunch:
    """Launch parameters of one expand program."""

    out_columns: int  # of one of its steps
    num_warps: int = 4
    num_stages: int = 2

    def __post_init__(self) -> None:
        check_power_of_two("out_columns", self.out_columns, 16, 512)
        check_power_of_two("num_warps", self.num_warps, 1, 16)
        _check_num_stages(self.num_stages)

    @classmethod
    def default(cls, page: int) -> ExpandLaunch:
        """Parameters for pages of `page` columns, where nothing was measured."""
        return cls(_page_columns(page))


@dataclass(frozen=True, slots=True)
class Sizes:
    """What a launch is chosen by. Its fields name the buckets of the tables."""

    dtype: str
    page: int  # columns of a page
    rank: int  # the greatest of the step at the modules: the width of h
    modules: int
    tokens: int
    features: int  # in of a shrink, the greatest out of an expand
    planes: int  # of h

    @classmethod
    def of_shrink(cls, h: torch.Tensor, group: ModuleGroup) -> Sizes:
        """Sizes of a shrink into h [planes, modules, T, width]."""
        return cls.of(group.sizes, h.shape, group.in_features)

    @classmethod
    def of_expand(cls, h: torch.Tensor, group: ModuleGroup) -> Sizes:
        """Sizes of an expand of h [planes, modules, T, width]."""
        return cls.of(group.sizes, h.shape, max(group.out_features))

    @classmethod
    def of(cls, group: GroupSizes, h_shape: torch.Size, features: int) -> Sizes:
        """Sizes for h [planes, modules, T, width], and in of a shrink or the greatest out of an expand."""
        planes, modules, tokens, width = h_shape
        dtype = str(group.dtype).removeprefix("torch.")
        return cls(dtype, group.page_columns, width, modules, tokens, features, planes)


# Cached: a step needs the parameters once for each module, and the tables' look-up takes longer.
@lru_cache(maxsize=4096)
def shrink_launch(device_name: str | None, sizes: Sizes) -> ShrinkLaunch:
    """What was measured for such a call on the device, or the default."""
    return tuned("lora_shrink", ShrinkLaunch.default(sizes.rank, sizes.page, sizes.dtype), device_name, **asdict(sizes))


@lru_cache(maxsize=4096)
def expand_launch(device_name: str | None, sizes: Sizes) -> ExpandLaunch:
    """What was measured for such a call on the device, or the default."""
    return tuned("lora_expand", ExpandLaunch.default(sizes.page), device_name, **asdict(sizes))


def num_parts(in_features: int) -> int:
    """Into how many parts the sum over the input is cut."""
    return min(MAX_PARTS, max(1, in_features // PART_COLUMNS))


def part_steps(in_features: int, parts: int, in_columns: int) -> int:
    """Steps of one part, whose columns do not depend on the size of the steps. The last parts may have fewer, or none.

    in 11008, parts 16: a part has 768 columns, 6 steps of 128 or 12 of 64, and parts 0 to 14 have all columns
    """
    columns = -(-in_features // (parts * MAX_IN_COLUMNS)) * MAX_IN_COLUMNS
    return -(-min(columns, in_features) // in_columns)


def steps_of_program(num_blocks: int, num_steps: int) -> int:
    """How many of num_steps steps over the columns an expand program takes, a power of two.

    As many programs as a GPU runs at once, and not more: a program begins with loads that wait for each other, and its
    steps then load ahead. 64 blocks of 112 steps: 8.
    """
    steps = max(1, num_blocks * num_steps // FEWEST_PROGRAMS)
    return min(MAX_STEPS, 1 << (steps.bit_length() - 1))


def _check_num_stages(num_stages: int) -> None:
    if not 1 <= num_stages <= 8:
        raise ValueError(f"num_stages is {num_stages}, want 1 to 8")


def _page_columns(page: int) -> int:
    """Columns of one page at a time if pages are wide enough."""
    columns = min(MAX_IN_COLUMNS, page & -page)
    return columns if columns >= 16 else 64
