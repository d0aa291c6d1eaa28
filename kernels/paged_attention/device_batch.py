"""A step's sequences as the GPU kernels read them: int32 tensors on the device.

Also which programs the kernels run: `work` for sequences with one query, `tiles` for those with several. How many
programs there are follows from the numbers of sequences and tokens and one bucket of the step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from kernels.buckets import bucket
from kernels.devices import upload_all
from kernels.groups import places_within


@dataclass(frozen=True, slots=True)
class Work:
    """What decode computes for sequences with one query: (token, split, context length, row of the tables), those of
    several splits first.

    The list is written on the device, where the lengths are. The host knows how long it is at most.
    """

    programs: torch.Tensor  # int32 [most programs, 4]
    num_programs: torch.Tensor  # int32 [1]: how many of them there are
    # int32 [num_tokens, tiles of heads]: how many parts of a tile are computed. Of those sequences zero between
    # launches: whoever computes the last part joins all of them, and sets it to zero again.
    num_done: torch.Tensor
    num_parts: int  # the programs that leave a part to join are among the first so many


class Splitting(NamedTuple):
    """How a kernel splits sequences. Key of a batch's work."""

    split_keys: int
    max_splits: int
    tiles: int  # of heads
    block_n: int
    window: int | None

    def most_splits(self, num_keys: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Splits of so many keys, as triton_loop.num_splits_of; with a window, those of its longest range of tiles."""
        if self.window is not None:
            num_keys = np.minimum(num_keys, self.window + self.block_n - 1)
        splits = np.clip((num_keys + self.split_keys // 2) // self.split_keys, 1, self.max_splits)
        return np.where(num_keys > 0, splits, 0)


@dataclass(frozen=True)
class DeviceBatch:
    """Built by `AttentionBatch.on_device` and `RowBatch.on_device`."""

    block_tables: torch.Tensor  # int32 [num_rows, max_blocks]
    table_rows: torch.Tensor  # int32 [num_seqs]: each sequence's row of the tables; -1: the sequence is left out
    query_start: torch.Tensor  # int32 [num_seqs + 1]
    context_lens: torch.Tensor  # int32 [num_seqs]
    is_causal: bool
    host_start: npt.NDArray[np.int32]
    host_lens: npt.NDArray[np.int32]  # or what no length exceeds, where the host does not know them
    has_exact_lens: bool = True
    _work: dict[Splitting, Work | None] = field(default_factory=dict)
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
        start, lens = np.array(query_start, dtype=np.int32), np.array(context_lens, dtype=np.int32)
        rows = np.arange(len(lens), dtype=np.int32)
        tables, table_rows, starts, lengths = upload_all(device, host_tables, rows, start, lens)
        return cls(tables, table_rows, starts, lengths, is_causal, start, lens)

    @classmethod
    def of_rows(
        cls,
        block_tables: torch.Tensor,
        table_rows: npt.NDArray[np.int32],
        query_start: Sequence[int],
        context_lens: Sequence[int],
        *,
        is_causal: bool,
    ) -> DeviceBatch:
        """Over tables that are on the device: an upload of 12 bytes for each sequence."""
        start, lens = np.array(query_start, dtype=np.int32), np.array(context_lens, dtype=np.int32)
        rows, starts, lengths = upload_all(block_tables.device, table_rows, start, lens)
        return cls(block_tables, rows, starts, lengths, is_causal, start, lens)

    def work(self, splitting: Splitting, write: Callable[[Work], None]) -> Work | None:
        """The programs of sequences with one query; None if the batch has no such sequence. `write` lists them.

        With D such sequences and E splits beyond the first of each there are at most D + bucket(E) programs, of which
        the first min(D, bucket(E)) + bucket(E) leave parts. Lengths 2000 and 40 at 512 keys: (0, 0) (0, 1) (0, 2)
        (0, 3) (1, 0), and room for one more.
        """
        if splitting not in self._work:
            lens = self.host_lens[np.diff(self.host_start) == 1].astype(np.int64)
            self._work[splitting] = self._new_work(lens, splitting, write) if len(lens) else None
        return self._work[splitting]

    def _new_work(self, lens: npt.NDArray[np.int64], splitting: Splitting, write: Callable[[Work], None]) -> Work:
        num_more = int(np.maximum(splitting.most_splits(lens) - 1, 0).sum())
        num_more = bucket(num_more) if self.has_exact_lens else num_more
        device = self.query_start.device
        sizes = (1, 4 * (len(lens) + num_more), int(self.host_start[-1]) * splitting.tiles)
        # The number is read just before the first programs: it lies beside them.
        num_programs, programs, num_done = empty_parts(device, *sizes)
        work = Work(
            programs.view(-1, 4), num_programs, num_done.view(-1, splitting.tiles), min(len(lens), num_more) + num_more
        )
        write(work)
        return work

    def tiles(self, queries_per_tile: int) -> torch.Tensor:
        """int32 [num_tiles, 2]: (sequence, its first query in the tile) of every sequence with several queries.

        Tiles with most keys come first, so that the last ones to run are short, and -1 after them: there are as many
        as G sequences with T queries in all can need. Chunks of 5 and 3 queries in tiles of 4, sequences 0 and 1:
        (0, 0) (0, 4) (1, 0) before they are ordered; as many as for 4 and 4, 2 + (8 - 2) // 4.
        """
        if queries_per_tile not in self._tiles:
            counts = np.diff(self.host_start)
            num_tiles = np.where(counts > 1, -(-counts // queries_per_tile), 0)
            sequences = np.repeat(np.arange(len(counts)), num_tiles)
            first = places_within(num_tiles) * queries_per_tile
            last_key = (self.host_lens - counts)[sequences] + first if self.is_causal else self.host_lens[sequences]
            order = np.argsort(-last_key, kind="stable")
            tiles = np.stack([sequences[order], first[order]], axis=1)
            several = counts[counts > 1]
            most_tiles = len(several) + (int(several.sum()) - len(several)) // queries_per_tile
            (self._tiles[queries_per_tile],) = upload_all(self.query_start.device, _fill(tiles, most_tiles))
        return self._tiles[queries_per_tile]


def _fill(pairs: npt.NDArray[np.int64], count: int) -> npt.NDArray[np.int32]:
    """The pairs, int32, and after them (-1, -1) up to the count."""
    filled = np.full((count, 2), -1, dtype=np.int32)
    filled[: len(pairs)] = pairs
    return filled


def empty_parts(device: torch.device, *sizes: int) -> list[torch.Tensor]:
    """Tensors int32 of these sizes whose values are not set, by one allocation; each at a multiple of 16 bytes."""
    places = np.cumsum([0, *(-(-size // 4) * 4 for size in sizes)]).tolist()
    whole = torch.empty(places[-1], dtype=torch.int32, device=device)
    return [whole[place : place + size] for place, size in zip(places, sizes, strict=False)]
