"""How adapter weights lie in memory: the arguments of the operators.

A module is one linear of the model, or its embedding, whose `in` is the vocabulary. The arena is one tensor of pages
[num_pages, 8, W]. A page holds 8 ranks of W columns. The matrix A [rank, in] of a slot is cut in ceil(rank / 8) groups
of 8 rows and ceil(in / W) tiles of columns; the ids of its pages stand in page_ids from first[slot] on, group by group,
and those of B [rank, out] follow at once. Rows past the rank are zero. Where W does not divide the width, as with an
odd vocabulary, the last tile has columns that are never read.

    rank 12, in 64, out 40, W 32: A takes pages (group 0: tiles 0 1)(group 1: tiles 0 1), B the same,
    with columns 32 to 39 in the first 8 columns of tile 1
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from contract.packed_layout import RANKS_PER_PAGE
from kernels.devices import check_devices

PAGE_RANKS = RANKS_PER_PAGE  # rows of one page
H_ALIGN = 4  # ranks of h that a GPU reads at once, if its width and strides are multiples


@dataclass(frozen=True, slots=True)
class PagedModule:
    """One module's weights in the arena, for all slots. Every tensor keeps its address for the life of the arena."""

    pages: torch.Tensor  # [num_pages, 8, W]
    page_ids: torch.Tensor  # int32, any length, shared by all modules and slots
    first: torch.Tensor  # int32 [num_slots]: index into page_ids
    rank: torch.Tensor  # int32 [num_slots]; 0 where the slot's adapter does not target the module, or there is none
    scaling: torch.Tensor  # float32 [num_slots]
    in_features: int
    out_features: int


class GroupSizes(NamedTuple):
    """What a launch depends on beside pointers, as plain data: a launch is prepared once for all groups like this."""

    num_slots: int
    in_features: int
    out_features: tuple[int, ...]
    page_columns: int
    stride_table: int
    dtype: torch.dtype
    device: torch.device

    @property
    def num_modules(self) -> int:
        return len(self.out_features)


@dataclass(frozen=True, slots=True)
class ModuleGroup:
    """Modules that read the same input and write side by side: q, k and v, or gate and up. Also a single module.

    The columns of their outputs may be of unequal widths, as with grouped queries.
    """

    pages: torch.Tensor  # [num_pages, 8, W]
    page_ids: torch.Tensor  # int32, any length
    first: torch.Tensor  # int32 [num_modules, num_slots], and so the next two
    rank: torch.Tensor
    scaling: torch.Tensor  # float32
    in_features: int
    out_features: tuple[int, ...]  # by module
    sizes: GroupSizes = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        first, pages = self.first, self.pages
        tables = {"page_ids": self.page_ids, "first": first, "rank": self.rank, "scaling": self.scaling}
        check_devices(pages=pages, **tables)
        widths = (self.in_features, self.out_features, pages.shape[2], first.stride(0))
        object.__setattr__(self, "sizes", GroupSizes(first.shape[1], *widths, pages.dtype, pages.device))

    @classmethod
    def of(cls, modules: Sequence[PagedModule]) -> ModuleGroup:
        """Modules of one arena as a group. Copies the slot table of several modules; of one it is a view."""
        head = modules[0]
        if any(module.pages is not head.pages or module.page_ids is not head.page_ids for module in modules):
            raise ValueError("the modules are of different arenas")
        if any(module.in_features != head.in_features for module in modules):
            raise ValueError(f"the modules read {[module.in_features for module in modules]} features, want one width")
        first, rank, scaling = (
            getattr(head, name)[None]
            if len(modules) == 1
            else torch.stack([getattr(module, name) for module in modules])
            for name in ("first", "rank", "scaling")
        )
        widths = tuple(module.out_features for module in modules)
        return cls(head.pages, head.page_ids, first, rank, scaling, head.in_features, widths)

    @property
    def num_modules(self) -> int:
        return len(self.out_features)

    @property
    def num_slots(self) -> int:
        return self.first.shape[1]

    def module(self, index: int) -> PagedModule:
        """One of the modules."""
        table = (self.first[index], self.rank[index], self.scaling[index])
        return PagedModule(self.pages, self.page_ids, *table, self.in_features, self.out_features[index])


# The tables of Epilogue that say where vectors begin.
VECTOR_TABLES = ("dora_scale", "lora_bias")


class EpilogueSizes(NamedTuple):
    """As GroupSizes. A stride of None: there is no such table."""

    page_values: int
    stride_dora_scale: int | None
    stride_lora_bias: int | None
    has_base_bias: bool


@dataclass(frozen=True, slots=True)
class Epilogue:
    """What an expand does beside adding s * (h @ B), for slots that have an adapter at the module.

    y = dora_scale * (y - base_bias + s * (h @ B + lora_bias)) + base_bias, as PEFT computes LoRA with bias and DoRA.
    dora_scale (PEFT's mag_norm_scale) is magnitude / norm of the rows of W + s * B.T @ A; the linear's own bias is not
    scaled.

    DoRA scales and biases [out] lie in the arena's pages as float32, side by side over the pages in the order of
    page_ids. The tables say where those of a module and slot begin; -1 means scales of 1 and biases of 0, and nothing
    is read.

        pages of 64 values, start 70, out 100: values 6 to 63 of page page_ids[1], then 0 to 41 of page_ids[2]
    """

    values: torch.Tensor  # float32 [num_pages, values of a page]: the pages' memory
    dora_scale: torch.Tensor | None = None  # int64 [num_modules, num_slots]
    lora_bias: torch.Tensor | None = None  # int64 [num_modules, num_slots]
    base_bias: torch.Tensor | None = None  # float32 [sum of out]; matters with a DoRA scale only
    sizes: EpilogueSizes = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        scales, biases = (None if each is None else each.stride(0) for each in (self.dora_scale, self.lora_bias))
        sizes = EpilogueSizes(self.values.shape[1], scales, biases, self.base_bias is not None)
        object.__setattr__(self, "sizes", sizes)


def page_values(pages: torch.Tensor) -> torch.Tensor:
    """The memory of pages [num_pages, 8, W] as float32 [num_pages, values of a page]."""
    return pages.view(len(pages), pages.shape[1] * pages.shape[2]).view(torch.float32)
