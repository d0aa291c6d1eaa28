"""Copies the chunks of a packed adapter into the pages that were reserved for it. Runs on loader threads."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from contract.packed_layout import ITEMSIZE
from data_plane.adapters.arena.pages import PagePool
from data_plane.adapters.arena.placement import Placement
from data_plane.adapters.arena.slots import Load, ModulePages
from data_plane.adapters.arena.transfers import Transfers
from data_plane.adapters.format.manifest import ChunkEntry, Manifest, ModuleEntry
from data_plane.adapters.format.packed import (
    TORCH_DTYPES,
    ModuleTensors,
    RowTensors,
    is_finite,
    module_tensors,
    read_chunk,
    read_rows,
    read_score_head,
)
from data_plane.adapters.format.paged import Bits, PagedChunk, read_paged
from data_plane.adapters.kinds.adapter_kind import PackedModule
from data_plane.adapters.kinds.base_weights import BaseWeights
from data_plane.errors import AdapterLoadError, AdapterMismatch, AdapterUnavailable
from data_plane.plan import ChunkBytes
from kernels.lora import PAGE_RANKS


@dataclass(frozen=True, slots=True)
class WrittenRows:
    """The rows of one module that a load has written so far."""

    num_rows: int = 0
    last_id: int = -1
    num_new: int = 0  # of tokens past the model's vocabulary


class AdapterWriter:
    """Writes into one arena. Only its load uses the pages that a load has reserved, so that nothing is locked."""

    def __init__(self, pool: PagePool, base: BaseWeights, vocab_size: int, transfers: Transfers) -> None:
        self._pool = pool
        self._transfers = transfers
        self._vocab_size = vocab_size
        self._base = base

    def write(
        self,
        load: Load,
        manifest: Manifest,
        chunks: Iterator[ChunkBytes],
        placement: Placement,
        page_ids: npt.NDArray[np.int64],
    ) -> int:
        """Copy every chunk into page_ids as placed. Returns the bytes of the matrices and vectors.

        Raises AdapterLoadError for an adapter that cannot be served and for a load that is cancelled meanwhile.
        """
        size_bytes = 0
        vectors = torch.zeros(placement.num_values)
        written: dict[str, WrittenRows] = {}
        for chunk in manifest.chunks:
            _check_wanted(load)
            data = next(chunks, None)
            if data is None:
                raise AdapterUnavailable(f"adapter {load.digest}: its source ended before chunk {chunk.name}")
            for rows in read_rows(manifest, chunk, data) if chunk.rows else ():
                _check_wanted(load)
                before = written.get(rows.entry.name, WrittenRows())
                written[rows.entry.name] = self._write_rows(rows, before, placement, page_ids, vectors, manifest)
                size_bytes += rows.rows.nbytes
            if not chunk.modules and not chunk.rows:
                assert placement.head is not None, "a chunk without modules and rows is a score head"
                values = read_score_head(manifest, chunk, data)
                vectors[placement.head.first_value :][: len(values)] = values
            if chunk.modules and manifest.page_columns is not None:
                size_bytes += self._write_paged(load, manifest, chunk, data, placement, page_ids, vectors)
            elif chunk.modules:
                size_bytes += self._write_modules(load, manifest, chunk, data, placement, page_ids, vectors)
        self._check_new_rows(manifest, written)
        if placement.num_values:
            self._pool.write_values(page_ids[placement.num_matrix_pages :], vectors, self._transfers.ring)
        return size_bytes + vectors.nbytes

    def _write_paged(
        self,
        load: Load,
        manifest: Manifest,
        chunk: ChunkEntry,
        data: ChunkBytes,
        placement: Placement,
        page_ids: npt.NDArray[np.int64],
        vectors: torch.Tensor,
    ) -> int:
        """Copy all matrices of a chunk at once. Returns the bytes of its modules."""
        read = read_paged(manifest, chunk, data)
        entries = [placement.modules[module.entry.name] for module in read.modules]
        own = page_ids[entries[0].first : entries[-1].first + entries[-1].num_a_pages + entries[-1].num_b_pages]
        if not self._pool.write_pages(own, self._cut(read, placement), self._transfers.ring):
            name = f"chunk {chunk.name}: {_not_finite(read, manifest)}"
            raise AdapterMismatch(f"adapter {manifest.digest}: {name} holds a value that is not finite")
        size_bytes = 0
        for module, place in zip(read.modules, entries, strict=True):
            if place.vectors:
                _check_wanted(load)  # DoRA scales take long
                part = module_tensors(read, module, TORCH_DTYPES[manifest.dtype])
                self._write_vectors(part, place, vectors, manifest.digest)
            size_bytes += _matrix_bytes(module.entry, manifest)
        return size_bytes

    def _cut(self, chunk: PagedChunk, placement: Placement) -> Bits:
        """The chunk's pages as this arena has them: its own may be narrower, and leave out some that are empty."""
        num_pages, _, columns = chunk.pages.shape
        factor = columns // self._pool.tile_width
        own = [placement.modules[module.entry.name] for module in chunk.modules]
        if factor > 1:
            tiles = chunk.pages.reshape(num_pages, PAGE_RANKS, factor, self._pool.tile_width).transpose(0, 2, 1, 3)
            pages = tiles.reshape(num_pages * factor, PAGE_RANKS, self._pool.tile_width)
        else:
            pages = chunk.pages
        if len(pages) == sum(place.num_a_pages + place.num_b_pages for place in own):
            return pages
        kept = []
        for part in (part for module in chunk.modules for part in (module.a, module.b)):
            groups = -(-part.rank // PAGE_RANKS)
            num_tiles = self._pool.num_pages_of(1, part.width)
            ids = part.first * factor + np.arange(part.num_pages * factor).reshape(groups, -1)[:, :num_tiles]
            kept.append(ids.reshape(-1))
        cut: Bits = pages[np.concatenate(kept)]
        return cut

    def _write_modules(
        self,
        load: Load,
        manifest: Manifest,
        chunk: ChunkEntry,
        data: ChunkBytes,
        placement: Placement,
        page_ids: npt.NDArray[np.int64],
        vectors: torch.Tensor,
    ) -> int:
        """Copy the matrices of a chunk of format 1 one by one. Returns the bytes of its modules."""
        size_bytes = 0
        for part in read_chunk(manifest, chunk, data):
            _check_wanted(load)  # a chunk may be all of the adapter, and DoRA scales take long
            place = placement.modules[part.module.name]
            middle, end = place.first + place.num_a_pages, place.first + place.num_a_pages + place.num_b_pages
            if part.module.kind.has_matrices:
                self._pool.write(page_ids[place.first : middle], part.tensors["a"], self._transfers.ring)
                self._pool.write(page_ids[middle:end], part.tensors["b"], self._transfers.ring)
            else:
                self._pool.zero(page_ids[place.first : end])
            self._write_vectors(part, place, vectors, manifest.digest)
            size_bytes += _matrix_bytes(part.module, manifest)
        return size_bytes

    def _write_vectors(self, part: ModuleTensors, place: ModulePages, vectors: torch.Tensor, digest: str) -> None:
        for table, vector in self._vectors(part, digest).items():
            vectors[place.vectors[table] :][: len(vector)] = vector

    def _write_rows(
        self,
        part: RowTensors,
        before: WrittenRows,
        placement: Placement,
        page_ids: npt.NDArray[np.int64],
        vectors: torch.Tensor,
        manifest: Manifest,
    ) -> WrittenRows:
        """Copy one chunk's rows behind those that were written before."""
        entry, place, count = part.entry, placement.rows[part.entry.name], part.entry.num_rows
        last, lowest = int(part.ids[-1]), int(part.ids[0])
        num_tokens = self._vocab_size if manifest.num_tokens is None else manifest.num_tokens
        if lowest <= before.last_id or last >= num_tokens or bool((part.ids[1:] <= part.ids[:-1]).any()):
            raise AdapterMismatch(
                f"adapter {manifest.digest}: the ids of the rows of {entry.name} do not rise from {before.last_id} to "
                f"below {num_tokens}"
            )
        first = place.first + self._pool.num_pages_of(before.num_rows, entry.width)
        own = page_ids[first : first + self._pool.num_pages_of(count, entry.width)]
        self._pool.write(own, part.rows, self._transfers.ring)
        vectors.view(torch.int32)[place.ids + before.num_rows :][:count] = part.ids
        if place.bias is not None and part.bias is not None:
            vectors[place.bias + before.num_rows :][:count] = part.bias
        num_new = int((part.ids >= self._vocab_size).sum())
        return WrittenRows(before.num_rows + count, last, before.num_new + num_new)

    def _check_new_rows(self, manifest: Manifest, written: Mapping[str, WrittenRows]) -> None:
        """Every new token has its row: ids rise, so that as many ids past the vocabulary are all of them."""
        num_new = max((manifest.num_tokens or 0) - self._vocab_size, 0)
        for name, rows in written.items():
            if rows.num_new != num_new:
                raise AdapterMismatch(
                    f"adapter {manifest.digest}: {rows.num_new} of {num_new} new tokens have rows of {name}"
                )

    def _vectors(self, part: ModuleTensors, digest: str) -> Mapping[str, torch.Tensor]:
        try:
            with torch.inference_mode():
                return part.module.kind.vectors(PackedModule(part.module, part.tensors, self._base))
        except ValueError as error:
            raise AdapterMismatch(f"adapter {digest}: {part.module.name}: {error}") from error


def _matrix_bytes(entry: ModuleEntry, manifest: Manifest) -> int:
    return entry.rank * (entry.in_features + entry.out_features) * ITEMSIZE[manifest.dtype]


def _not_finite(chunk: PagedChunk, manifest: Manifest) -> str:
    """The name of the first matrix that has such a value."""
    for module in chunk.modules:
        for name, part in (("a", module.a), ("b", module.b)):
            if not is_finite(torch.from_numpy(chunk.matrix(part)).view(TORCH_DTYPES[manifest.dtype])):
                return f"{module.entry.name}.{name}"
    raise AssertionError("a page has a value that is not finite, and no matrix has one: padding is zero")


def _check_wanted(load: Load) -> None:
    """Raises AdapterLoadError if the load was cancelled."""
    if load.is_cancelled:
        raise AdapterLoadError(f"adapter {load.digest}: the load of slot {load.slot} was cancelled")
