"""How the sampling kernels are launched: safe defaults, and what `kernels.tuning` knows better.

Nothing here changes a token: maxima and integer sums are the same in any order, and of equal scores the lowest id wins.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from functools import lru_cache

import torch

from kernels.buckets import check_power_of_two
from kernels.tuning import tuned


@dataclass(frozen=True, slots=True)
class SampleLaunch:
    """Launch parameters of the passes over a step's logits."""

    part: int = 8192  # tokens of one program; fewer programs than multiprocessors leave some idle
    tile: int = 1024  # tokens per load
    num_warps: int = 4  # of the passes for the highest value and for the draw
    search_warps: int = 8  # of the passes of a limit, which hold 16 sums per token of a tile

    def __post_init__(self) -> None:
        check_power_of_two("part", self.part, 256, 1 << 16)
        check_power_of_two("tile", self.tile, 128, min(4096, self.part))
        check_power_of_two("num_warps", self.num_warps, 1, 16)
        check_power_of_two("search_warps", self.search_warps, 1, 16)


@dataclass(frozen=True, slots=True)
class Sizes:
    """What a launch is chosen by. Its fields name the buckets of the tables."""

    dtype: str  # of the logits
    rows: int
    vocab: int

    @classmethod
    def of(cls, logits: torch.Tensor) -> Sizes:
        """Sizes of logits [n, V]."""
        return cls(str(logits.dtype).removeprefix("torch."), *logits.shape)


@lru_cache(maxsize=1024)
def sample_launch(device_name: str | None, sizes: Sizes) -> SampleLaunch:
    """What was measured for such a call on the device, or the default."""
    return tuned("sample", SampleLaunch(), device_name, **asdict(sizes))
