"""Copies the chunks of a packed adapter into the pages that were reserved for it. Runs on loader threads."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext

import numpy as np
import numpy.typing as npt
import torch

from data_plane.adapters.arena.pages import PagePool
from data_plane.adapters.arena.placement import Placement
from data_plane.adapters.arena.slots import Load
from data_plane.adapters.format.manifest import Manifest
from data_plane.adapters.format.packed import ModuleTensors, read_chunk
from data_plane.adapters.kinds.adapter_kind import ArenaWeights, PackedModule
from data_plane.adapters.kinds.base_weights import BaseWeights
from data_plane.errors import AdapterLoadError, AdapterMismatch, AdapterUnavailable


class AdapterWriter:
    """Writes into one arena. Only its load uses the pages that a load has reserved, so that nothing is locked."""

    def __init__(self, pool: PagePool, base: BaseWeights) -> None:
        self._pool = pool
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
        for chunk in manifest.chunks:
            _check_wanted(load)
            data = next(chunks, None)
            if data is None:
                raise AdapterUnavailable(f"adapter {load.digest}: its source ended before chunk {chunk.name}")
            for part in read_chunk(manifest, chunk, data):
                _check_wanted(load)  # a chunk may be all of the adapter, and DoRA scales take long
                weights, entry = self._weights(part, manifest.digest), placement.modules[part.module.name]
                middle = entry.first + entry.num_a_pages
                self._pool.write(page_ids[entry.first : middle], weights.a)
                self._pool.write(page_ids[middle : middle + entry.num_b_pages], weights.b)
                for table, vector in weights.vectors.items():
                    vectors[entry.vectors[table] :][: len(vector)] = vector
                size_bytes += weights.a.nbytes + weights.b.nbytes
        if placement.num_values:
            self._pool.write_values(page_ids[placement.num_matrix_pages :], vectors)
        return size_bytes + vectors.nbytes

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
