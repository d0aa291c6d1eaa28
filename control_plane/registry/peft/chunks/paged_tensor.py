"""The matrices of a chunk's modules in the order in which an arena keeps them, so that a worker copies them at once.

A matrix [rank, width] is cut into pages of 8 ranks and `columns` columns: all pages of the first 8 ranks from left to
right, then those of the next 8. What a page has beyond the matrix is zero.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import BinaryIO

import numpy as np

from contract.packed_layout import ITEMSIZE, PAGES, RANKS_PER_PAGE, num_pages_of
from control_plane.errors import FieldViolation, InvalidAdapter
from control_plane.registry.peft.chunks.tensor_codec import StoredArray
from control_plane.registry.peft.chunks.tensor_sources import TensorSource, served_block
from control_plane.registry.peft.safetensors_header import TensorEntry


@dataclass(frozen=True, slots=True)
class PagedMatrix:
    """One matrix [rank, width]."""

    entry: TensorEntry | None  # where it comes from; what is missing there is zero. None: all of it is
    rank: int
    width: int
    is_transposed: bool = False  # the entry is [width, rank]


@dataclass(frozen=True, slots=True)
class PagedTensor:
    """All matrices of a chunk."""

    matrices: Sequence[PagedMatrix]
    columns: int  # of a page
    dtype: str  # "float32", "bfloat16" or "float16"

    @property
    def name(self) -> str:
        """In the chunk."""
        return PAGES

    @property
    def shape(self) -> tuple[int, ...]:
        """In the chunk."""
        num_pages = sum(num_pages_of(matrix.rank, matrix.width, self.columns) for matrix in self.matrices)
        return num_pages, RANKS_PER_PAGE, self.columns

    @property
    def page_bytes(self) -> int:
        return RANKS_PER_PAGE * self.columns * ITEMSIZE[self.dtype]

    @property
    def size_bytes(self) -> int:
        """In the chunk."""
        return self.shape[0] * self.page_bytes

    def write(self, out: BinaryIO, source: TensorSource, slice_values: int, check: Callable[[], None]) -> None:
        """Write all pages after `out`'s position, about `slice_values` at a time. Pages of zeros may be left out.

        Raises InvalidAdapter with all matrices whose values cannot be served. `check` is called before each slice.
        """
        start, violations = out.tell(), list[FieldViolation]()
        for matrix in self.matrices:
            if matrix.entry is not None:
                try:
                    self._write_matrix(out, start, matrix, matrix.entry, source, slice_values, check)
                except InvalidAdapter as error:
                    violations += error.violations
            start += num_pages_of(matrix.rank, matrix.width, self.columns) * self.page_bytes
        if violations:
            raise InvalidAdapter(*violations)
        out.seek(start)

    def _write_matrix(
        self,
        out: BinaryIO,
        start: int,
        matrix: PagedMatrix,
        entry: TensorEntry,
        source: TensorSource,
        slice_values: int,
        check: Callable[[], None],
    ) -> None:
        tiles, page_values = -(-matrix.width // self.columns), RANKS_PER_PAGE * self.columns
        shape = entry.shape[::-1] if matrix.is_transposed else entry.shape
        num_ranks, width = min(matrix.rank, shape[0]), min(matrix.width, shape[1])
        # Whole rows of the source at once, as far as a slice holds them.
        groups = -(-num_ranks // RANKS_PER_PAGE)
        if matrix.is_transposed:
            groups_at_once = min(groups, max(slice_values // page_values, 1))
            tiles_at_once = max(slice_values // (groups_at_once * page_values), 1)
        else:
            tiles_at_once = min(tiles, max(slice_values // page_values, 1))
            groups_at_once = max(slice_values // (tiles_at_once * page_values), 1)
        for group in range(0, groups, groups_at_once):
            ranks = slice(group * RANKS_PER_PAGE, min((group + groups_at_once) * RANKS_PER_PAGE, num_ranks))
            for tile in range(0, -(-width // self.columns), tiles_at_once):
                check()
                used = slice(tile * self.columns, min((tile + tiles_at_once) * self.columns, width))
                block = self._block(source, entry, matrix, ranks, used)
                pages = _in_pages(block, self.columns)
                # Rows of pages that are whole follow each other in the file: they are one write.
                for index, part in enumerate([pages] if pages.shape[1] == tiles else pages):
                    out.seek(start + ((group + index) * tiles + tile) * self.page_bytes)
                    out.write(np.ascontiguousarray(part).data)

    def _block(
        self, source: TensorSource, entry: TensorEntry, matrix: PagedMatrix, ranks: slice, columns: slice
    ) -> StoredArray:
        begin, size = (ranks.start, columns.start), (ranks.stop - ranks.start, columns.stop - columns.start)
        if matrix.is_transposed:
            return served_block(source, entry, begin[::-1], size[::-1], self.dtype).T
        return served_block(source, entry, begin, size, self.dtype)


def _in_pages(block: StoredArray, columns: int) -> StoredArray:
    """[rows of pages, pages, RANKS_PER_PAGE, columns] of a block whose corner is a page's."""
    groups, tiles = -(-block.shape[0] // RANKS_PER_PAGE), -(-block.shape[1] // columns)
    padded = block
    if block.shape != (groups * RANKS_PER_PAGE, tiles * columns):
        padded = np.zeros((groups * RANKS_PER_PAGE, tiles * columns), dtype=block.dtype)
        padded[: block.shape[0], : block.shape[1]] = block
    return padded.reshape(groups, RANKS_PER_PAGE, tiles, columns).transpose(0, 2, 1, 3)
