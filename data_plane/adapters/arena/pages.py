"""The arena's memory: pages of 8 ranks by W columns, and which of them are free.

W is the greatest common divisor of the widths of the model's linears (1024 for a typical 8B decoder), so that a matrix
is a whole number of pages of one size. Only the last pages of a vocabulary, and of an output that is narrow beside its
input, may have unused columns (contract.packed_layout.page_widths). One page size means one byte budget without
fragmentation: an adapter fits if its bytes do, and the control plane counts bytes.
Not thread-safe: the arena locks.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt
import torch

from contract.packed_layout import page_widths
from data_plane.adapters.arena.transfers import PinnedRing
from data_plane.adapters.format.packed import is_finite
from data_plane.adapters.format.paged import BITS, Bits
from data_plane.adapters.free_runs import FreeRuns
from data_plane.plan import TargetKind, TargetModule
from kernels.devices import upload
from kernels.lora import PAGE_RANKS, page_values


class PagePool:
    """Pages and their free list."""

    def __init__(
        self, targets: Sequence[TargetModule], arena_bytes: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.tile_width = math.gcd(*(width for target in targets for width in _page_widths(target)))
        self.page_bytes = PAGE_RANKS * self.tile_width * dtype.itemsize
        self.values_per_page = self.page_bytes // 4  # float32 values
        self.num_pages = arena_bytes // self.page_bytes
        # Pages of a large CPU tensor take no memory before they are written. No page is read before it is written.
        self.pages = torch.empty(self.num_pages, PAGE_RANKS, self.tile_width, dtype=dtype, device=device)
        self.values = page_values(self.pages)  # float32 [num_pages, values_per_page], the same memory
        # Invariant: the free pages and num_used are num_pages together.
        self._free = FreeRuns(self.num_pages)
        self.num_used = 0

    @property
    def num_free(self) -> int:
        return self.num_pages - self.num_used

    def num_pages_of(self, rank: int, width: int) -> int:
        """Pages of one matrix [rank, width]."""
        return -(-rank // PAGE_RANKS) * self._num_tiles(width)

    def _num_tiles(self, width: int) -> int:
        return -(-width // self.tile_width)

    def take(self, num_pages: int) -> npt.NDArray[np.int64] | None:
        """Ids of free pages, or None if there are too few. Prefers the smallest run that holds all of them.

        Without such a run the longest runs are joined, so that the pages lie in few pieces.
        """
        if num_pages > self.num_free:
            return None
        if num_pages == 0:
            return np.zeros(0, dtype=np.int64)
        start = self._free.take(num_pages)
        pieces = self._free.take_pieces(num_pages) if start is None else [(start, num_pages)]
        self.num_used += num_pages
        return np.sort(np.concatenate([np.arange(start, start + count, dtype=np.int64) for start, count in pieces]))

    def give_back(self, page_ids: npt.NDArray[np.int64]) -> None:
        """Return pages that `take` gave."""
        ordered = np.sort(page_ids)
        for first, count in runs(ordered):
            self._free.give_back(int(ordered[first]), count)
        self.num_used -= len(page_ids)

    def zero(self, page_ids: npt.NDArray[np.int64]) -> None:
        """Clear pages before their next owner writes them."""
        self.pages.index_fill_(0, upload(page_ids, self.pages.device), 0)

    def write(self, page_ids: npt.NDArray[np.int64], matrix: torch.Tensor, ring: PinnedRing | None) -> None:
        """Write a matrix [rank, width] into its pages, with zeros in the rest of them. `ring`: see write_pages."""
        with _staged(self.in_pages(matrix), ring) as pages:
            self._put(page_ids, pages)

    def in_pages(self, matrix: torch.Tensor) -> torch.Tensor:
        """The pages [num_pages, PAGE_RANKS, tile_width] of a matrix [rank, width], with zeros in the rest of them."""
        rank, width = matrix.shape
        num_groups, num_tiles = -(-rank // PAGE_RANKS), self._num_tiles(width)
        padded = matrix
        if matrix.shape != (num_groups * PAGE_RANKS, num_tiles * self.tile_width):
            padded = matrix.new_zeros(num_groups * PAGE_RANKS, num_tiles * self.tile_width)
            padded[:rank, :width] = matrix
        tiles = padded.view(num_groups, PAGE_RANKS, num_tiles, self.tile_width).transpose(1, 2)
        return tiles.reshape(-1, PAGE_RANKS, self.tile_width)

    def write_pages(self, page_ids: npt.NDArray[np.int64], pages: Bits, ring: PinnedRing | None) -> bool:
        """Copy whole pages [len(page_ids), ...] as they are. Returns whether all values are finite.

        `ring`: what they pass through on their way to a GPU.
        """
        if ring is not None:
            staged = ring.fill(pages, self.pages.dtype)
            self._put(page_ids, staged)
            ring.queued()
            return is_finite(staged)
        finite = True
        for first, count in runs(page_ids):
            place = self.pages[int(page_ids[first]) :][:count]
            place.view(torch.uint8).numpy().view(pages.dtype)[...] = pages[first : first + count]
            finite = finite and is_finite(place)
        return finite

    def _put(self, page_ids: npt.NDArray[np.int64], pages: torch.Tensor) -> None:
        """Copy pages [len(page_ids), ...] on the host to their places: one copy where these follow one another."""
        if len(page_ids) and int(page_ids[-1]) - int(page_ids[0]) == len(page_ids) - 1:  # they rise
            begin = int(page_ids[0])
            self.pages[begin : begin + len(page_ids)].copy_(pages, non_blocking=True)
            return
        device = self.pages.device
        self.pages.index_copy_(0, upload(page_ids, device), pages.to(device, non_blocking=True))

    def read(self, page_ids: torch.Tensor, rank: int, width: int) -> torch.Tensor:
        """The matrix [rank, width] of pages, page_ids int64 on the device."""
        num_tiles = self._num_tiles(width)
        tiles = self.pages.index_select(0, page_ids).view(-1, num_tiles, PAGE_RANKS, self.tile_width)
        return tiles.transpose(1, 2).reshape(-1, num_tiles * self.tile_width)[:rank, :width]

    def write_values(self, page_ids: npt.NDArray[np.int64], values: torch.Tensor, ring: PinnedRing | None) -> None:
        """Write float32 values, given on the host, side by side into pages. `ring`: see write_pages."""
        padded = values.new_zeros(len(page_ids) * self.values_per_page)
        padded[: len(values)] = values
        device = self.pages.device
        with _staged(padded.view(len(page_ids), self.values_per_page), ring) as rows:
            self.values.index_copy_(0, upload(page_ids, device), rows.to(device, non_blocking=True))

    def check(self, held: Sequence[npt.NDArray[np.int64]]) -> None:
        """Assert that free pages and the given ones are all pages, each once."""
        free = [np.arange(start, start + length) for start, length in self._free]
        every = np.sort(np.concatenate([*free, *held, np.zeros(0, dtype=np.int64)]))
        assert np.array_equal(every, np.arange(self.num_pages)), "a page is lost or held twice"
        assert sum(len(ids) for ids in held) == self.num_used, "num_used is not what is held"


@contextlib.contextmanager
def _staged(values: torch.Tensor, ring: PinnedRing | None) -> Iterator[torch.Tensor]:
    """The values on their way to the arena, whose copy the block queues: in the ring's memory where there is a ring."""
    if ring is None:
        yield values
        return
    bits = values.contiguous().view(torch.uint8).numpy().view(BITS[values.dtype.itemsize])
    yield ring.fill(bits, values.dtype)
    ring.queued()


def runs(page_ids: npt.NDArray[np.int64]) -> list[tuple[int, int]]:
    """(first index, pages) of each run of ids that follow one another: [3 4 9] gives (0, 2) (2, 1)."""
    if len(page_ids) == 0:
        return []
    starts = [0, *(np.flatnonzero(np.diff(page_ids) != 1) + 1).tolist()]
    return [(start, end - start) for start, end in zip(starts, [*starts[1:], len(page_ids)], strict=True)]


def _page_widths(target: TargetModule) -> tuple[int, ...]:
    is_embedding, is_head = target.kind is TargetKind.EMBEDDING, target.kind is TargetKind.HEAD
    return page_widths(target.in_features, target.out_features, is_embedding=is_embedding, is_head=is_head)
