"""How adapter weights lie in memory and which token takes which: the arguments of `add_lora`.

Two forms of one site's weights (a site is one linear of the model, or its embedding, whose `in` is the vocabulary):

PagedSite, where they live. The arena is one tensor of pages [num_pages, 8, W]. A page holds 8 ranks of W columns. The
matrix A [rank, in] of a slot is cut in ceil(rank / 8) groups of 8 rows and ceil(in / W) tiles of columns; the ids of
its pages stand in page_ids from first[slot] on, group by group, and those of B [rank, out] follow at once. Rows past
the rank are zero. Where W does not divide the width, as with an odd vocabulary, the last tile has columns that are
never read.

    rank 12, in 64, out 40, W 32: A takes pages (group 0: tiles 0 1)(group 1: tiles 0 1), B the same,
    with columns 32 to 39 in the first 8 columns of tile 1

StackedSite, a copy for dense products: the A of several slots one below the other, and their B.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import numpy.typing as npt
import torch

PAGE_RANKS = 8  # rows of one page
H_ALIGN = 4  # ranks of h that a GPU reads at once, if its width and strides are multiples


@dataclass(frozen=True, slots=True)
class PagedSite:
    """One site's weights in the arena, for all slots. Every tensor keeps its address for the life of the arena."""

    pages: torch.Tensor  # [num_pages, 8, W]
    page_ids: torch.Tensor  # int32 [num_pages], shared by all sites and slots
    first: torch.Tensor  # int32 [num_slots]: index into page_ids
    rank: torch.Tensor  # int32 [num_slots]; 0 where the slot's adapter does not target the site, or there is none
    scaling: torch.Tensor  # float32 [num_slots]
    in_features: int
    out_features: int


@dataclass(frozen=True, slots=True)
class SiteGroup:
    """Sites that read the same input and write side by side: q, k and v, or gate and up. Also a single site.

    The columns of their outputs may be of unequal widths, as with grouped queries.
    """

    pages: torch.Tensor  # [num_pages, 8, W]
    page_ids: torch.Tensor  # int32 [num_pages]
    first: torch.Tensor  # int32 [num_sites, num_slots], and so the next two
    rank: torch.Tensor
    scaling: torch.Tensor  # float32
    in_features: int
    out_features: tuple[int, ...]  # by site

    @classmethod
    def of(cls, sites: Sequence[PagedSite]) -> SiteGroup:
        """Sites of one arena as a group. Copies the slot table of several sites; of one it is a view."""
        head = sites[0]
        if any(site.pages is not head.pages or site.page_ids is not head.page_ids for site in sites):
            raise ValueError("the sites are of different arenas")
        if any(site.in_features != head.in_features for site in sites):
            raise ValueError(f"the sites read {[site.in_features for site in sites]} features, want one width")
        first, rank, scaling = (
            getattr(head, name)[None] if len(sites) == 1 else torch.stack([getattr(site, name) for site in sites])
            for name in ("first", "rank", "scaling")
        )
        widths = tuple(site.out_features for site in sites)
        return cls(head.pages, head.page_ids, first, rank, scaling, head.in_features, widths)

    @property
    def num_sites(self) -> int:
        return len(self.out_features)

    @property
    def num_slots(self) -> int:
        return self.first.shape[1]

    def site(self, index: int) -> PagedSite:
        """One of the sites."""
        table = (self.first[index], self.rank[index], self.scaling[index])
        return PagedSite(self.pages, self.page_ids, *table, self.in_features, self.out_features[index])


@dataclass(frozen=True, slots=True)
class Epilogue:
    """What an expand does beside adding s * (h @ B), for slots that have an adapter at the site.

    y = gain * (y - base_bias + s * (h @ B + lora_bias)) + base_bias, as PEFT does for LoRA with bias and for DoRA:
    there gain is magnitude / norm of the rows of W + s * B.T @ A, and the linear's own bias is not scaled.

    Gains and biases [out] lie in the arena's pages as float32, side by side over the pages in the order of page_ids.
    The tables say where those of a site and slot begin; -1 is for gains of 1 and biases of 0, of which nothing is read.

        pages of 64 values, start 70, out 100: values 6 to 63 of page page_ids[1], then 0 to 41 of page_ids[2]
    """

    values: torch.Tensor  # float32 [num_pages, values of a page]: the pages' memory
    gain: torch.Tensor | None = None  # int64 [num_sites, num_slots]
    lora_bias: torch.Tensor | None = None  # int64 [num_sites, num_slots]
    base_bias: torch.Tensor | None = None  # float32 [sum of out]; matters with a gain only


@dataclass(frozen=True, slots=True, eq=False)
class Columns:
    """What each row of a stack is. Sites with equal ranks and scalings share one object, and so its masks."""

    slot: torch.Tensor  # int32 [R]; -2 for rows of nobody
    scaling: torch.Tensor  # float32 [R]
    rows_by_slot: dict[int, slice]
    scaling_by_slot: dict[int, float]


@dataclass(frozen=True, slots=True)
class SlotVectors:
    """What one slot has at a site beside A and B (see Epilogue); None: nothing."""

    gain: torch.Tensor | None = None  # float32 [out]
    lora_bias: torch.Tensor | None = None  # float32 [out]


@dataclass(frozen=True, slots=True)
class StackedSite:
    """The weights of some slots, stacked by rank."""

    a: torch.Tensor  # [R, in]
    b: torch.Tensor  # [R, out]
    columns: Columns
    vectors: Mapping[int, SlotVectors] = field(default_factory=dict)  # by slot, of those that have any
    base_bias: torch.Tensor | None = None  # float32 [out]; matters with a gain only


@dataclass(frozen=True, slots=True)
class Segment:
    """Tokens of one slot."""

    slot: int
    rows: slice | torch.Tensor  # of the step's tokens; a slice where they lie side by side
    num_tokens: int


@dataclass(frozen=True)
class Route:
    """Which token takes which slot, computed once per step for all sites."""

    token_slots: torch.Tensor  # int32 [num_tokens] on the device; -1: no adapter
    rows: slice | torch.Tensor  # the tokens that have an adapter
    row_slots: torch.Tensor  # int32: their slots
    slots: list[int]  # each slot that a token has, in rising order
    _host_slots: npt.NDArray[np.int32]
    # The form that was chosen, by the columns and the width of both sides.
    is_dense: dict[tuple[Columns, int], bool] = field(default_factory=dict)
    _hidden: dict[Columns, torch.Tensor] = field(default_factory=dict)

    @classmethod
    def build(cls, token_slots: torch.Tensor, device: torch.device) -> Route:
        """Route of int32 [num_tokens], best given on the host."""
        host = token_slots.cpu().numpy()
        on_device = token_slots.to(device)
        counts = np.bincount(host + 1, minlength=1)
        slots = np.flatnonzero(counts[1:]).tolist()
        if counts[0] == 0:
            return cls(on_device, slice(0, len(host)), on_device, slots, host)
        rows = _rows(np.flatnonzero(host >= 0), device)
        return cls(on_device, rows, on_device[rows], slots, host)

    @cached_property
    def segments(self) -> list[Segment]:
        """The tokens of each slot, in the order of `slots`."""
        order = np.argsort(self._host_slots, kind="stable")
        ordered = self._host_slots[order]
        starts = np.searchsorted(ordered, self.slots)
        ends = np.append(starts[1:], len(order)) if len(starts) else starts
        is_run = order[ends - 1] - order[starts] + 1 == ends - starts
        on_device = torch.from_numpy(order).to(self.token_slots.device)
        segments = []
        for slot, start, end, lies_together in zip(
            self.slots, starts.tolist(), ends.tolist(), is_run.tolist(), strict=True
        ):
            first = int(order[start])
            rows = slice(first, first + end - start) if lies_together else on_device[start:end]
            segments.append(Segment(slot, rows, end - start))
        return segments

    def hidden(self, columns: Columns) -> torch.Tensor:
        """[rows with an adapter, R]: True where a row's slot is not the column's."""
        if columns not in self._hidden:
            self._hidden[columns] = self.row_slots[:, None] != columns.slot[None, :]
        return self._hidden[columns]


def page_values(pages: torch.Tensor) -> torch.Tensor:
    """The memory of pages [num_pages, 8, W] as float32 [num_pages, values of a page]."""
    return pages.view(len(pages), pages.shape[1] * pages.shape[2]).view(torch.float32)


def _rows(indices: npt.NDArray[np.int64], device: torch.device) -> slice | torch.Tensor:
    """A slice if the sorted indices have no gap."""
    if len(indices) == 0:
        return slice(0, 0)
    if int(indices[-1]) - int(indices[0]) + 1 == len(indices):
        return slice(int(indices[0]), int(indices[-1]) + 1)
    return torch.from_numpy(indices).to(device)


def stack_columns(members: Sequence[tuple[int, int, float]], device: torch.device) -> Columns:
    """Columns of members (slot or -2, rank, scaling), in the order of the stack."""
    rows_by_slot: dict[int, slice] = {}
    start = 0
    for slot, rank, _ in members:
        if slot >= 0:
            rows_by_slot[slot] = slice(start, start + rank)
        start += rank
    ranks = [rank for _, rank, _ in members]
    slots = np.repeat(np.array([slot for slot, _, _ in members], dtype=np.int32), ranks)
    scalings = np.repeat(np.array([scaling for _, _, scaling in members], dtype=np.float32), ranks)
    return Columns(
        torch.from_numpy(slots).to(device),
        torch.from_numpy(scalings).to(device),
        rows_by_slot,
        {slot: scaling for slot, _, scaling in members if slot >= 0},
    )
