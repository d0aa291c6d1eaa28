"""Copies the chunks of a packed adapter into the pages that were reserved for it. Runs on loader threads."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from data_plane.adapters.arena.pages import PagePool
from data_plane.adapters.arena.placement import Placement
from data_plane.adapters.arena.slots import Load
from data_plane.adapters.format.manifest import Manifest
from data_plane.adapters.format.packed import ModuleTensors, RowTensors, read_chunk, read_rows, read_score_head
from data_plane.adapters.kinds.adapter_kind import ArenaWeights, PackedModule
from data_plane.adapters.kinds.base_weights import BaseWeights
from data_plane.errors import AdapterLoadError, AdapterMismatch, AdapterUnavailable


@dataclass(frozen=True, slots=True)
class WrittenRows:
    """The rows of one module that a load has written so far."""

    num_rows: int = 0
    last_id: int = -1
    num_new: int = 0  # of tokens past the model's vocabulary


class AdapterWriter:
    """Writes into one arena. Only its load uses the pages that a load has reserved, so that nothing is locked."""

    def __init__(self, pool: PagePool, base: BaseWeights, vocab_size: int) -> None:
        self._pool = pool
        self._vocab_size = vocab_size
        self._base = base
        # Kinds compute beside the steps, so that no step waits for a load.
        device = pool.pages.device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]  # torch's stubs

    def write(
        self,
        load: Load,
        manifest: Manifest,
        chunks: Iterator[bytes],
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
            for part in read_chunk(manifest, chunk, data) if chunk.modules else ():
                _check_wanted(load)  # a chunk may be all of the adapter, and DoRA scales take long
                weights, entry = self._weights(part, manifest.digest), placement.modules[part.module.name]
                middle = entry.first + entry.num_a_pages
                self._pool.write(page_ids[entry.first : middle], weights.a)
                self._pool.write(page_ids[middle : middle + entry.num_b_pages], weights.b)
                for table, vector in weights.vectors.items():
                    vectors[entry.vectors[table] :][: len(vector)] = vector
                size_bytes += weights.a.nbytes + weights.b.nbytes
        self._check_new_rows(manifest, written)
        if placement.num_values:
            self._pool.write_values(page_ids[placement.num_matrix_pages :], vectors)
        return size_bytes + vectors.nbytes

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
        self._pool.write(page_ids[first : first + self._pool.num_pages_of(count, entry.width)], part.rows)
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

    def _weights(self, part: ModuleTensors, digest: str) -> ArenaWeights:
        beside: AbstractContextManager[object] = nullcontext()
        if self._stream is not None:
            beside = torch.cuda.stream(self._stream)
        try:
            with beside, torch.inference_mode():
                return part.module.kind.weights(PackedModule(part.module, part.tensors, self._base))
        except ValueError as error:
            raise AdapterMismatch(f"adapter {digest}: {part.module.name}: {error}") from error


def _check_wanted(load: Load) -> None:
    """Raises AdapterLoadError if the load was cancelled."""
    if load.is_cancelled:
        raise AdapterLoadError(f"adapter {load.digest}: the load of slot {load.slot} was cancelled")
