"""A step's sequences as the GPU kernels read them: int32 tensors on the device, uploaded once per step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch


@dataclass(frozen=True)
class DeviceBatch:
    """Built by `AttentionBatch.on_device`."""

    block_tables: torch.Tensor  # int32 [num_seqs, max_blocks]
    query_start: torch.Tensor  # int32 [num_seqs + 1]
    context_lens: torch.Tensor  # int32 [num_seqs]
    decode_sequences: torch.Tensor  # int32 [num_decodes]: sequences with one query
    is_causal: bool
    _host_start: npt.NDArray[np.int32]
    _host_lens: npt.NDArray[np.int32]
    _tiles: dict[int, torch.Tensor] = field(default_factory=dict)

    @classmethod
    def build(
        cls,
        host_tables: npt.NDArray[np.int32],
        query_start: Sequence[int],
        context_lens: Sequence[int],
        device: torch.device,
        *,
        is_causal: bool,
    ) -> DeviceBatch:
        """One upload for everything."""
        start = np.array(query_start, dtype=np.int32)
        lens = np.array(context_lens, dtype=np.int32)
        decodes = np.flatnonzero(np.diff(start) == 1).astype(np.int32)
        packed = upload(np.concatenate([host_tables.reshape(-1), start, lens, decodes]), device)
        tables, starts, lengths, sequences = torch.split(
            packed, [host_tables.size, len(start), len(lens), len(decodes)]
        )
        return cls(tables.view(host_tables.shape), starts, lengths, sequences, is_causal, start, lens)

    def tiles(self, queries_per_tile: int) -> torch.Tensor:
        """int32 [num_tiles, 2]: (sequence, its first query in the tile) of every sequence with several queries.

        Tiles with most keys come first, so that the last ones to run are short. Chunks of 5 and 3 queries in tiles
        of 4, sequences 0 and 1: (0, 0) (0, 4) (1, 0) before they are ordered.
        """
        if queries_per_tile not in self._tiles:
            counts = np.diff(self._host_start)
            num_tiles = np.where(counts > 1, -(-counts // queries_per_tile), 0)
            sequences = np.repeat(np.arange(len(counts)), num_tiles)
            within = np.arange(len(sequences)) - np.repeat(np.cumsum(num_tiles) - num_tiles, num_tiles)
            first = within * queries_per_tile
            last_key = (self._host_lens - counts)[sequences] + first if self.is_causal else self._host_lens[sequences]
            order = np.argsort(-last_key, kind="stable")
            tiles = np.stack([sequences[order], first[order]], axis=1).astype(np.int32)
            self._tiles[queries_per_tile] = upload(tiles, self.query_start.device)
        return self._tiles[queries_per_tile]


def upload(array: npt.NDArray[np.int32], device: torch.device) -> torch.Tensor:
    """The array on the device; through pinned memory to a GPU, so that nothing waits for it."""
    tensor = torch.from_numpy(array)
    if device.type != "cuda":
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)
