"""A step's sequences as the GPU kernels read them: int32 tensors on the device, uploaded once per step.

Also which programs the kernels run: `splits` for sequences with one query, `tiles` for those with several. How many
they are follows from the numbers of sequences and tokens and one bucket of the step; those not needed are -1.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch

from kernels.buckets import bucket
from kernels.devices import upload


@dataclass(frozen=True, slots=True)
class Splits:
    """Programs for sequences with one query, those of sequences with several first, and -1 behind them.

    With D sequences and E splits beyond the first of each there are D + bucket(E) programs. At most J = min(D,
    bucket(E)) sequences have several, whose programs are among the first J + bucket(E): these leave parts to join.
    """

    programs: torch.Tensor  # int32 [D + bucket(E), 2]: (sequence, split)
    joins: torch.Tensor  # int32 [J, 2]: (sequence with several programs, its first one)
    num_parts: int  # J + bucket(E)


@dataclass(frozen=True)
class DeviceBatch:
    """Built by `AttentionBatch.on_device`."""

    block_tables: torch.Tensor  # int32 [num_seqs, max_blocks]
    query_start: torch.Tensor  # int32 [num_seqs + 1]
    context_lens: torch.Tensor  # int32 [num_seqs]
    is_causal: bool
    _host_start: npt.NDArray[np.int32]
    _host_lens: npt.NDArray[np.int32]
    _splits: dict[tuple[int, int, int | None], Splits] = field(default_factory=dict)
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
        """One upload for everything. Columns of the tables are added up to a bucket; they are never read."""
        num_blocks = host_tables.shape[1]
        host_tables = np.pad(host_tables, ((0, 0), (0, bucket(num_blocks) - num_blocks)))
        start = np.array(query_start, dtype=np.int32)
        lens = np.array(context_lens, dtype=np.int32)
        tables, starts, lengths = upload_all(device, host_tables, start, lens)
        return cls(tables, starts, lengths, is_causal, start, lens)

    def splits(self, split_keys: int, max_splits: int, most_keys: int | None) -> Splits:
        """Programs enough for each sequence's splits; how long they are, the kernel knows.

        Sequences have at most max_splits, each of at least split_keys keys, of which most_keys are visible. Lengths
        2000 and 40 at 512 keys: programs (0, 0) (0, 1) (0, 2) (0, 3) (1, 0) (-1, -1), and joins (0, 0) (-1, -1).
        """
        key = (split_keys, max_splits, most_keys)
        if key not in self._splits:
            decodes = np.flatnonzero(np.diff(self._host_start) == 1)
            num_keys = self._host_lens[decodes]
            if most_keys is not None:
                num_keys = np.minimum(num_keys, most_keys)
            counts = np.minimum(-(-num_keys // split_keys), max_splits)
            order = np.argsort(-counts, kind="stable")
            decodes, counts = decodes[order], counts[order]
            first = np.cumsum(counts) - counts
            within = np.arange(counts.sum()) - np.repeat(first, counts)
            programs = np.stack([np.repeat(decodes, counts), within], axis=1)
            joins = np.stack([decodes, first], axis=1)[counts > 1]
            num_more = bucket(len(programs) - len(decodes))
            most_joins = min(len(decodes), num_more)
            programs_there, joins_there = upload_all(
                self.query_start.device, _fill(programs, len(decodes) + num_more), _fill(joins, most_joins)
            )
            self._splits[key] = Splits(programs_there, joins_there, most_joins + num_more)
        return self._splits[key]

    def tiles(self, queries_per_tile: int) -> torch.Tensor:
        """int32 [num_tiles, 2]: (sequence, its first query in the tile) of every sequence with several queries.

        Tiles with most keys come first, so that the last ones to run are short, and -1 behind them: there are as many
        as G sequences with T queries in all can need. Chunks of 5 and 3 queries in tiles of 4, sequences 0 and 1:
        (0, 0) (0, 4) (1, 0) before they are ordered; as many as for 4 and 4, 2 + (8 - 2) // 4.
        """
        if queries_per_tile not in self._tiles:
            counts = np.diff(self._host_start)
            num_tiles = np.where(counts > 1, -(-counts // queries_per_tile), 0)
            sequences = np.repeat(np.arange(len(counts)), num_tiles)
            within = np.arange(len(sequences)) - np.repeat(np.cumsum(num_tiles) - num_tiles, num_tiles)
            first = within * queries_per_tile
            last_key = (self._host_lens - counts)[sequences] + first if self.is_causal else self._host_lens[sequences]
            order = np.argsort(-last_key, kind="stable")
            tiles = np.stack([sequences[order], first[order]], axis=1)
            several = counts[counts > 1]
            most_tiles = len(several) + (int(several.sum()) - len(several)) // queries_per_tile
            (self._tiles[queries_per_tile],) = upload_all(self.query_start.device, _fill(tiles, most_tiles))
        return self._tiles[queries_per_tile]


def _fill(pairs: npt.NDArray[np.int64], count: int) -> npt.NDArray[np.int32]:
    """The pairs, int32, and behind them (-1, -1) up to the count."""
    filled = np.full((count, 2), -1, dtype=np.int32)
    filled[: len(pairs)] = pairs
    return filled


def upload_all(device: torch.device, *arrays: npt.NDArray[np.int32]) -> list[torch.Tensor]:
    """The arrays on the device by one copy.

    Each begins at a multiple of 16 bytes: Triton compiles a kernel anew for a pointer that does not.
    """
    places = np.cumsum([0, *(-(-array.size // 4) * 4 for array in arrays)]).tolist()
    packed = np.zeros(places[-1], dtype=np.int32)
    for place, array in zip(places, arrays, strict=False):
        packed[place : place + array.size] = array.reshape(-1)
    there = upload(packed, device)
    return [there[place : place + array.size].view(array.shape) for place, array in zip(places, arrays, strict=False)]
