"""How the shrink and expand kernels are launched: safe defaults, and what `kernels.tuning` knows better.

Nothing here changes a bit of any result: sums are cut at multiples of MAX_IN_COLUMNS whatever the tiles are.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kernels.devices import device_name
from kernels.lora.layout import SiteGroup
from kernels.tuning import tuned

MAX_IN_COLUMNS = 128
PART_COLUMNS = 512  # the least that is worth a program of its own
MAX_PARTS = 16


@dataclass(frozen=True, slots=True)
class ShrinkLaunch:
    """Of one shrink program."""

    ranks: int  # that it computes
    in_columns: int  # of one of its steps
    num_warps: int = 4
    num_stages: int = 3

    def __post_init__(self) -> None:
        _check("ranks", self.ranks, 16, 128)
        _check("in_columns", self.in_columns, 16, MAX_IN_COLUMNS)
        _check("num_warps", self.num_warps, 1, 16)
        if not 1 <= self.num_stages <= 8:
            raise ValueError(f"num_stages is {self.num_stages}, want 1 to 8")

    @classmethod
    def default(cls, width: int, group: SiteGroup) -> ShrinkLaunch:
        """For ranks up to `width`."""
        return cls(min(64, max(16, _round_up(width))), _page_columns(group))

    @classmethod
    def choose(cls, x: torch.Tensor, width: int, group: SiteGroup) -> ShrinkLaunch:
        """What was measured for such a call on the device of x, or the default."""
        return tuned("lora_shrink", cls.default(width, group), device_name(x), **shrink_sizes(x, width, group))


@dataclass(frozen=True, slots=True)
class ExpandLaunch:
    """Of one expand program. It is never pipelined: its product has an operand in registers."""

    out_columns: int  # that it computes
    num_warps: int = 4

    def __post_init__(self) -> None:
        _check("out_columns", self.out_columns, 16, 512)
        _check("num_warps", self.num_warps, 1, 16)

    @classmethod
    def default(cls, group: SiteGroup) -> ExpandLaunch:
        return cls(_page_columns(group))

    @classmethod
    def choose(cls, y: torch.Tensor, h: torch.Tensor, group: SiteGroup) -> ExpandLaunch:
        """What was measured for such a call on the device of y, or the default."""
        return tuned("lora_expand", cls.default(group), device_name(y), **expand_sizes(y, h, group))


def shrink_sizes(x: torch.Tensor, width: int, group: SiteGroup) -> dict[str, int | str]:
    """The bucket of a shrink."""
    return {**_sizes(x, width, group), "in_features": group.in_features}


def expand_sizes(y: torch.Tensor, h: torch.Tensor, group: SiteGroup) -> dict[str, int | str]:
    """The bucket of an expand from h [planes, sites, T, width]."""
    return {**_sizes(y, h.shape[3], group), "out_features": max(group.out_features), "planes": h.shape[0]}


def num_parts(in_features: int) -> int:
    """Into how many parts the sum over the input is cut."""
    return min(MAX_PARTS, max(1, in_features // PART_COLUMNS))


def part_steps(in_features: int, parts: int, in_columns: int) -> int:
    """Steps of one part, whose columns do not depend on the size of the steps. The last parts may have fewer, or none.

    in 11008, parts 16: a part has 768 columns, 6 steps of 128 or 12 of 64, and parts 0 to 14 have all columns
    """
    columns = -(-in_features // (parts * MAX_IN_COLUMNS)) * MAX_IN_COLUMNS
    return -(-min(columns, in_features) // in_columns)


def _sizes(rows: torch.Tensor, width: int, group: SiteGroup) -> dict[str, int | str]:
    return {
        "dtype": str(rows.dtype).removeprefix("torch."),
        "page": group.pages.shape[2],
        "rank": width,
        "sites": group.num_sites,
        "tokens": rows.shape[0],
    }


def _page_columns(group: SiteGroup) -> int:
    """Columns of one page at a time if pages are wide enough."""
    page = group.pages.shape[2]
    columns = min(MAX_IN_COLUMNS, page & -page)
    return columns if columns >= 16 else 64


def _round_up(size: int) -> int:
    return 1 << max(size - 1, 0).bit_length()


def _check(name: str, value: int, least: int, most: int) -> None:
    if not least <= value <= most or value & (value - 1):
        raise ValueError(f"{name} is {value}, want a power of two from {least} to {most}")
