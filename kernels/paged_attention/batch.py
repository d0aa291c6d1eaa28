"""What paged attention knows about one step: the blocks of each sequence, and what all layers share.

Index tensors and masks are built once per (block size, window, dtype, device) of a step and kept in the batch, so
that a layer only gathers and multiplies.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import numpy.typing as npt
import torch

from kernels.paged_attention.device_batch import DeviceBatch
from kernels.paged_attention.native_step import AttentionStep

# Decode sequences are gathered in groups of similar length. A group's keys should still lie in the cache when they
# are multiplied: on the CPU 0.5 to 1 MiB was fastest for 32 sequences of 1k and of 150 tokens and for 64 of 40
# (8 heads of 64; 8 MiB: 1.4x slower at 1k, 128 KiB: 1.2x to 1.4x slower for the short ones).
GROUP_BYTES_CPU = 1 << 20
GROUP_BYTES_DEVICE = 256 << 20
# A group pads its sequences to its longest; this many times its longest may be longer than its shortest.
GROUP_PADDING = 1.25


@dataclass(frozen=True, slots=True)
class KeyBlocks:
    """The blocks of one gather, for sequences of equal padded length."""

    num_sequences: int
    num_blocks: int  # per sequence, padding included
    first_block: int | None  # set where all the blocks lie side by side in the cache: a view replaces the gather
    block_ids: torch.Tensor  # int64 [num_sequences * num_blocks]
    start: int  # visible keys begin here within the gathered tokens; 0 for more than one sequence
    end: int  # and end here

    def take(self, cache: torch.Tensor) -> torch.Tensor:
        """[num_sequences, end - start, Hkv, D] of a cache [num_blocks, block_size, Hkv, D]."""
        if self.first_block is not None:
            blocks = cache[self.first_block : self.first_block + len(self.block_ids)]
        else:
            blocks = cache.index_select(0, self.block_ids)
        tokens = blocks.reshape(self.num_sequences, self.num_blocks * cache.shape[1], *cache.shape[2:])
        return tokens[:, self.start : self.end]


@dataclass(frozen=True, slots=True)
class DecodeGroup:
    """Sequences with one query each."""

    rows: torch.Tensor  # int64 [num_sequences]: their tokens in the step
    keys: KeyBlocks
    mask: torch.Tensor | None  # [num_sequences, 1, 1, num_keys], 0 or -inf; None where every key is visible
    own_keys: torch.Tensor  # int64 [num_sequences]: the query's own key among the gathered ones


@dataclass(frozen=True, slots=True)
class PrefillSequence:
    """One sequence with several queries."""

    start: int  # its first token in the step
    end: int  # one past its last
    keys: KeyBlocks
    is_causal: bool  # queries and keys are the same tokens and no window cuts: a triangle, no mask is needed
    mask: torch.Tensor | None  # [num_queries, num_keys], 0 or -inf; None where is_causal, and where all is visible


@dataclass(frozen=True)
class AttentionBatch:
    """The sequences of one step, shared by all layers. Built by `build`, and by `ragged` where there is no cache."""

    block_tables: torch.Tensor  # int32 [num_seqs, max_blocks]; entries past a sequence's blocks are never read
    query_start: list[int]  # num_seqs + 1 offsets into the step's tokens
    context_lens: list[int]  # KV length of each sequence, this step's tokens included
    host_tables: npt.NDArray[np.int32]
    is_causal: bool = True  # False: every query sees all keys of its sequence
    is_ragged: bool = False  # the keys are the queries' tokens, which the tables number
    device_tables: torch.Tensor | None = None  # int32 [num_rows, max_blocks]: the same tables, kept on the device
    table_rows: npt.NDArray[np.int32] | None = None  # [num_seqs]: each sequence's row of device_tables
    _groups: dict[tuple[object, ...], list[DecodeGroup]] = field(default_factory=dict)
    _prefills: dict[tuple[object, ...], list[PrefillSequence]] = field(default_factory=dict)
    _on_device: dict[tuple[torch.device, int], DeviceBatch] = field(default_factory=dict)

    @classmethod
    def build(
        cls,
        block_tables: torch.Tensor,
        query_start: Sequence[int],
        context_lens: Sequence[int],
        *,
        is_causal: bool = True,
        device_tables: torch.Tensor | None = None,
        table_rows: npt.NDArray[np.int32] | None = None,
    ) -> AttentionBatch:
        """Check the step's shape. A block table on the host saves a wait for the device.

        Sequence i's queries are the tokens query_start[i] to query_start[i + 1]; in a causal batch its last ones, in
        another any number of them. Sequences with one query take the batched decode path wherever they stand. Where the
        tables are on the device too, in the rows table_rows of device_tables, they are not uploaded.
        """
        query_start, context_lens = list(query_start), list(context_lens)
        num_sequences = len(context_lens)
        if block_tables.dtype != torch.int32 or block_tables.dim() != 2 or block_tables.shape[0] != num_sequences:
            raise ValueError(
                f"block_tables is {block_tables.dtype} {tuple(block_tables.shape)}, want int32 [{num_sequences}, n]"
            )
        if len(query_start) != num_sequences + 1 or query_start[0] != 0:
            raise ValueError(f"query_start has {len(query_start)} offsets for {num_sequences} sequences, want 0 first")
        for index, context_len in enumerate(context_lens):
            num_queries = query_start[index + 1] - query_start[index]
            least_keys = num_queries if is_causal else min(num_queries, 1)
            if num_queries < 0 or context_len < least_keys:
                raise ValueError(
                    f"sequence {index} has {num_queries} queries and {context_len} keys, want at least {least_keys}"
                )
        if (device_tables is None) != (table_rows is None) or (
            table_rows is not None and len(table_rows) != num_sequences
        ):
            raise ValueError(
                f"device_tables and table_rows want each other, and a row for each of {num_sequences} sequences"
            )
        return cls(
            block_tables,
            query_start,
            context_lens,
            block_tables.cpu().numpy(),
            is_causal,
            device_tables=device_tables,
            table_rows=table_rows,
        )

    @classmethod
    def ragged(cls, lengths: Sequence[int]) -> AttentionBatch:
        """Whole sequences one after the other, each token seeing all tokens of its own sequence.

        Lengths 2 and 3: the tables [0 1 -] and [2 3 4] over tokens as blocks of one.
        """
        lens = np.asarray(lengths, dtype=np.int64)
        if lens.ndim != 1 or (lens < 0).any():
            raise ValueError(f"lengths is {lengths}, want a list of numbers of at least 0")
        start = np.concatenate([[0], np.cumsum(lens)])
        columns = np.arange(lens.max(initial=0))
        tables = np.minimum(start[:-1, None] + columns, start[1:, None] - 1).astype(np.int32)
        return cls(torch.from_numpy(tables), start.tolist(), lens.tolist(), tables, is_causal=False, is_ragged=True)

    @property
    def num_tokens(self) -> int:
        """Of the step."""
        return self.query_start[-1]

    def on_host(self) -> AttentionBatch:
        """This batch, as `RowBatch.on_host`."""
        return self

    def on_device(self, device: torch.device, block_size: int) -> DeviceBatch:
        """What the GPU kernels read, uploaded by the first layer."""
        if (device, block_size) not in self._on_device:
            self.check_width(block_size)
            lengths = (self.query_start, self.context_lens)
            if self.device_tables is not None and self.table_rows is not None and self.device_tables.device == device:
                there = DeviceBatch.of_rows(self.device_tables, self.table_rows, *lengths, is_causal=self.is_causal)
            else:
                there = DeviceBatch.build(self.host_tables, *lengths, device, is_causal=self.is_causal)
            self._on_device[device, block_size] = there
        return self._on_device[device, block_size]

    def check_width(self, block_size: int) -> None:
        """Refuse a sequence that its row of the block table cannot hold."""
        longest = max(self.context_lens, default=0)
        if -(-longest // block_size) > self.host_tables.shape[1]:
            raise ValueError(f"{longest} tokens need more than {self.host_tables.shape[1]} blocks of {block_size}")

    @cached_property
    def native_step(self) -> AttentionStep:
        """What the native ops read."""
        return AttentionStep.build(self.host_tables, self.query_start, self.context_lens)

    def decode_groups(self, cache: torch.Tensor, sliding_window: int | None, dtype: torch.dtype) -> list[DecodeGroup]:
        """The sequences with one query, for caches like this one, widened to dtype; built for the first layer."""
        bytes_per_token = cache.shape[2] * cache.shape[3] * dtype.itemsize
        key = (cache.shape[1], sliding_window, bytes_per_token, dtype, cache.device)
        if key not in self._groups:
            builder = _Builder(self, cache.shape[1], sliding_window, dtype, cache.device)
            self._groups[key] = builder.decode_groups(bytes_per_token)
        return self._groups[key]

    def prefills(self, cache: torch.Tensor, sliding_window: int | None, dtype: torch.dtype) -> list[PrefillSequence]:
        """The sequences with several queries, likewise."""
        key = (cache.shape[1], sliding_window, dtype, cache.device)
        if key not in self._prefills:
            self._prefills[key] = _Builder(self, cache.shape[1], sliding_window, dtype, cache.device).prefills()
        return self._prefills[key]


@dataclass(frozen=True)
class RowBatch:
    """A step of rows that feed one token each, in place of an AttentionBatch: the host knows no row's length.

    Made anew for each step, and for each graph that is captured: the step's first layer writes the work list. What is
    launched depends on the number of sequences and on max_context_len alone.
    """

    block_tables: torch.Tensor  # int32 [num_rows, max_blocks] on the device
    table_rows: torch.Tensor  # int32 [num_seqs]: each token's row of the tables; -1: no row, its output is not written
    context_lens: torch.Tensor  # int32 [num_seqs]: KV length, the step's token included
    max_context_len: int  # no length of a row exceeds it
    _on_device: list[DeviceBatch] = field(default_factory=list, init=False)  # at most one
    _on_host: list[AttentionBatch] = field(default_factory=list, init=False)

    is_causal = True
    is_ragged = False

    def __post_init__(self) -> None:
        tables, rows, lens = self.block_tables, self.table_rows, self.context_lens
        if tables.dim() != 2 or rows.dim() != 1 or rows.shape != lens.shape or self.max_context_len < 1:
            raise ValueError(
                f"block_tables is {tuple(tables.shape)}, table_rows {tuple(rows.shape)}, context_lens "
                f"{tuple(lens.shape)}, want [num_rows, max_blocks], [n] and [n]; max_context_len is "
                f"{self.max_context_len}, want at least 1"
            )
        if {tables.dtype, rows.dtype, lens.dtype} != {torch.int32} or len(
            {tables.device, rows.device, lens.device}
        ) > 1:
            raise ValueError("block_tables, table_rows and context_lens must be int32 tensors on one device")

    @property
    def num_tokens(self) -> int:
        """Of the step."""
        return self.table_rows.shape[0]

    def on_device(self, device: torch.device, block_size: int) -> DeviceBatch:
        """What the GPU kernels read. Nothing is uploaded."""
        assert device == self.block_tables.device, (
            f"the rows are on {self.block_tables.device}, the queries on {device}"
        )
        if self.max_context_len > self.block_tables.shape[1] * block_size:
            raise ValueError(
                f"{self.max_context_len} tokens need more than {self.block_tables.shape[1]} blocks of {block_size}"
            )
        if not self._on_device:
            count = self.num_tokens
            start = torch.arange(count + 1, dtype=torch.int32, device=device)
            most = np.full(count, self.max_context_len, dtype=np.int32)
            there = DeviceBatch(
                self.block_tables,
                self.table_rows,
                start,
                self.context_lens,
                True,
                np.arange(count + 1, dtype=np.int32),
                most,
                has_exact_lens=False,
            )
            self._on_device.append(there)
        return self._on_device[0]

    def on_host(self) -> AttentionBatch:
        """The same step for where there is no Triton; waits for the device."""
        if not self._on_host:
            rows, lens = self.table_rows.long().clamp(min=0), self.context_lens.clamp(min=1)
            tables = self.block_tables[rows].cpu()
            self._on_host.append(AttentionBatch.build(tables, range(self.num_tokens + 1), lens.tolist()))
        return self._on_host[0]


class _Builder:
    """Builds what the layers of one sliding window share."""

    def __init__(
        self,
        batch: AttentionBatch,
        block_size: int,
        sliding_window: int | None,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.batch = batch
        self.block_size = block_size
        self.window = sliding_window
        self.dtype = dtype
        self.device = device
        batch.check_width(block_size)

    def decode_groups(self, bytes_per_token: int) -> list[DecodeGroup]:
        items: list[tuple[int, int, int]] = []  # (blocks, sequence, first block)
        for sequence in np.flatnonzero(np.diff(self.batch.query_start) == 1).tolist():
            first_block, end_block = self._blocks(sequence, 1)
            items.append((end_block - first_block, sequence, first_block))
        budget = GROUP_BYTES_CPU if self.device.type == "cpu" else GROUP_BYTES_DEVICE
        groups: list[list[tuple[int, int, int]]] = []
        for item in sorted(items):
            group = groups[-1] if groups else []
            is_full = (len(group) + 1) * item[0] * self.block_size * bytes_per_token > budget
            if not group or is_full or item[0] > GROUP_PADDING * group[0][0]:
                groups.append([item])
            else:
                group.append(item)
        return [self._decode(group) for group in groups]

    def prefills(self) -> list[PrefillSequence]:
        starts = self.batch.query_start
        counts = [starts[idx + 1] - starts[idx] for idx in range(len(self.batch.context_lens))]
        return [self._prefill(idx, count, *self._blocks(idx, count)) for idx, count in enumerate(counts) if count > 1]

    def _blocks(self, sequence: int, num_queries: int) -> tuple[int, int]:
        """(first, one past the last) of the blocks that its queries see."""
        context_len = self.batch.context_lens[sequence]
        return self._first_key(context_len, num_queries) // self.block_size, -(-context_len // self.block_size)

    def _first_key(self, context_len: int, num_queries: int) -> int:
        """First key that any of the queries sees."""
        if self.window is None:
            return 0
        return max(context_len - num_queries + 1 - self.window, 0)

    def _keys(self, tables: npt.NDArray[np.int32], start: int, end: int) -> KeyBlocks:
        ids = np.ascontiguousarray(tables.reshape(-1), dtype=np.int64)
        is_run = bool((np.diff(ids) == 1).all())
        return KeyBlocks(
            num_sequences=tables.shape[0],
            num_blocks=tables.shape[1],
            first_block=int(ids[0]) if is_run else None,
            block_ids=torch.from_numpy(ids).to(self.device),
            start=start,
            end=end,
        )

    def _decode(self, group: list[tuple[int, int, int]]) -> DecodeGroup:
        lens, starts = self.batch.context_lens, self.batch.query_start
        sequences = [sequence for _, sequence, _ in group]
        rows = torch.tensor([starts[sequence] for sequence in sequences], device=self.device)
        width = group[-1][0]  # the longest: groups are sorted
        # Padding repeats a sequence's last block, which is readable memory; the mask hides it.
        num_blocks, ids, first_blocks = np.array(group).T
        columns = first_blocks[:, None] + np.minimum(np.arange(width), num_blocks[:, None] - 1)
        tables = self.batch.host_tables[ids[:, None], columns]
        ends = np.array([lens[sequence] for sequence in sequences])
        begins = np.zeros_like(ends) if self.window is None else np.maximum(ends - self.window, 0)
        first_keys, end_keys = begins - first_blocks * self.block_size, ends - first_blocks * self.block_size
        own_keys = torch.from_numpy(end_keys - 1 - (first_keys if len(group) == 1 else 0)).to(self.device)
        if len(group) == 1:
            return DecodeGroup(rows, self._keys(tables, int(first_keys[0]), int(end_keys[0])), None, own_keys)
        keys = self._keys(tables, 0, width * self.block_size)
        positions = np.arange(width * self.block_size)
        visible = (positions >= first_keys[:, None]) & (positions < end_keys[:, None])
        return DecodeGroup(rows, keys, self._mask(visible)[:, None, None, :], own_keys)

    def _prefill(self, sequence: int, num_queries: int, first_block: int, end_block: int) -> PrefillSequence:
        context_len = self.batch.context_lens[sequence]
        first_token = self.batch.query_start[sequence]
        offset = first_block * self.block_size
        first_key = self._first_key(context_len, num_queries)
        keys = self._keys(
            self.batch.host_tables[sequence : sequence + 1, first_block:end_block],
            first_key - offset,
            context_len - offset,
        )
        if not self.batch.is_causal:
            return PrefillSequence(first_token, first_token + num_queries, keys, False, None)
        is_causal = num_queries == context_len and (self.window is None or self.window >= context_len)
        mask = None
        if not is_causal:
            query_pos = np.arange(context_len - num_queries, context_len)[:, None]
            key_pos = np.arange(first_key, context_len)[None, :]
            visible = key_pos <= query_pos
            if self.window is not None:
                visible &= query_pos - key_pos < self.window
            mask = self._mask(visible)
        return PrefillSequence(first_token, first_token + num_queries, keys, is_causal, mask)

    def _mask(self, visible: npt.NDArray[np.bool_]) -> torch.Tensor:
        mask = torch.zeros(visible.shape, dtype=self.dtype)
        return mask.masked_fill_(torch.from_numpy(~visible), float("-inf")).to(self.device)
