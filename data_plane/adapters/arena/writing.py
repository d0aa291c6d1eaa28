"""Copies the chunks of a packed adapter into the pages that were reserved for it. Runs on loader threads."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
import torch

from data_plane.adapters.arena.base_weights import BaseWeights
from data_plane.adapters.arena.dora import DoraScaleStream
from data_plane.adapters.arena.pages import PagePool
from data_plane.adapters.arena.placement import Placement
from data_plane.adapters.arena.slots import Load, ModuleWeights
from data_plane.adapters.format.manifest import Manifest
from data_plane.adapters.format.packed import ModuleTensors, read_chunk
from data_plane.errors import AdapterLoadError, AdapterMismatch, AdapterUnavailable


class AdapterWriter:
    """Of one arena. Pages that a load has reserved are nobody else's, so that nothing is locked."""

    def __init__(self, pool: PagePool, base: BaseWeights) -> None:
        self._pool = pool
        self._base = base
        self._dora_scales = DoraScaleStream(pool.pages.device)

    def write(
        self,
        load: Load,
        manifest: Manifest,
        chunks: Iterator[bytes],
        placement: Placement,
        page_ids: npt.NDArray[np.int64],
    ) -> int:
        """Copy every chunk into page_ids as placed; the bytes of the matrices and vectors.

        Raises AdapterLoadError for what cannot be used, and for a load that is cancelled on the way.
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
                entry = placement.weights[part.module.name]
                middle = entry.first + entry.num_a_pages
                self._pool.write(page_ids[entry.first : middle], part.a)
                self._pool.write(page_ids[middle : middle + entry.num_b_pages], part.b)
                self._put_vector(vectors, entry, part, manifest.digest)
                size_bytes += part.a.nbytes + part.b.nbytes
        if placement.num_values:
            self._pool.write_values(page_ids[placement.num_matrix_pages :], vectors)
        return size_bytes + vectors.nbytes

    def _put_vector(self, vectors: torch.Tensor, entry: ModuleWeights, part: ModuleTensors, digest: str) -> None:
        """The module's LoRA bias, or its DoRA scales, into its place among the adapter's vectors."""
        if part.vector is None:
            return
        if entry.lora_bias_at is not None:
            vectors[entry.lora_bias_at :][: len(part.vector)] = part.vector
        if entry.dora_scale_at is not None:
            try:
                weight = self._base.weight(part.module.name)
                dora_scale = self._dora_scales.dora_scale(weight, part.a, part.b, entry.scaling, part.vector)
            except ValueError as error:
                raise AdapterMismatch(f"adapter {digest}: {part.module.name}: {error}") from error
            vectors[entry.dora_scale_at :][: len(dora_scale)] = dora_scale


def _check_wanted(load: Load) -> None:
    """Raises AdapterLoadError if the load was cancelled."""
    if load.is_cancelled:
        raise AdapterLoadError(f"adapter {load.digest}: the load of slot {load.slot} was cancelled")
