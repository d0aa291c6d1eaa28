"""Builds the packed tensors of one step from its rows. Vector operations, no loop over rows."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch

from data_plane.adapters.step.further_columns import FurtherColumns
from data_plane.engine.device.device_rows import DeviceRows
from data_plane.engine.rows import BoolArray, Int64Array, Rows
from data_plane.engine.sampling.logprobs import LogprobsRequest
from data_plane.errors import PlanRefused
from data_plane.plan import Int32Array, PooledRow, RowLogprobs, no_rows
from kernels.devices import upload_all
from kernels.groups import places_within
from kernels.paged_attention import AttentionBatch


@dataclass(frozen=True, slots=True)
class Drafts:
    """Draft tokens of the rows of a pass."""

    counts: Int64Array  # [num_rows] of each row, 0 and more
    token_ids: Int64Array  # [sum of counts] in the order of the rows

    def first(self, most: int) -> Drafts:
        """The first draft tokens of each row, `most` at most."""
        return Drafts(np.minimum(self.counts, most), self.token_ids[places_within(self.counts) < most])

    @property
    def ahead(self) -> Int64Array:
        """Of each token of a pass, which has the rows' own and behind each its drafts: how many tokens of its row come
        before it."""
        return places_within(self.counts + 1)

    @property
    def starts(self) -> Int64Array:
        """[num_rows] the place of each row's own token in the pass."""
        return np.cumsum(self.counts + 1) - self.counts - 1

    @property
    def pass_ids(self) -> Int64Array:
        """The token ids of the pass. Those of the rows' own, which the device knows, are 0 here."""
        ahead = self.ahead
        token_ids = np.zeros(len(ahead), dtype=np.int64)
        token_ids[ahead > 0] = self.token_ids
        return token_ids

    def of(self, indices: Int64Array) -> Drafts:
        """Those of the rows at these indices, which rise."""
        is_chosen = np.zeros(len(self.counts), dtype=np.bool_)
        is_chosen[indices] = True
        return Drafts(self.counts[indices], self.token_ids[np.repeat(is_chosen, self.counts)])


@dataclass(frozen=True, slots=True)
class PassOutput:
    """What one forward pass brings the rows (see StepOutput)."""

    rows: Int32Array = field(default_factory=no_rows)
    token_ids: Int32Array = field(default_factory=no_rows)
    failed_rows: Int32Array = field(default_factory=no_rows)
    sampled_logprobs: list[RowLogprobs] = field(default_factory=list)
    pooled: list[PooledRow] = field(default_factory=list)
    unconstrained_rows: Int32Array = field(default_factory=no_rows)
    waiting_rows: Int32Array = field(default_factory=no_rows)


@dataclass(frozen=True, slots=True)
class StepBatch:
    """One forward pass. A sequence is one row's tokens of the pass; sequences follow one another."""

    rows: Int64Array  # [num_seqs] decoding rows ascending, then prefills in the plan's order
    num_tokens: Int64Array  # [num_seqs] tokens of each
    starts: Int64Array  # [num_seqs] its first token among those of the step
    input_ids: torch.Tensor  # int64 [T] on the device
    position_ids: torch.Tensor  # int64 [T] on the device
    kv_positions: torch.Tensor  # int64 [T] on the device: where in the cache each token's KV goes
    attention: AttentionBatch
    token_slots: torch.Tensor  # int32 [T] on the host: column of each token in the slot table, -1 for no adapter
    slots: list[int]  # columns in the step
    kept_slots: torch.Tensor  # int32 on the host: columns of the tokens in `kept`
    further: FurtherColumns | None  # of tokens with several adapters
    kept_further: FurtherColumns | None  # of those in `kept`
    sampled_rows: Int64Array  # [n] rows that sample, in the step's order
    sampled_on_device: torch.Tensor  # int64 [n] the same on the device
    pooled_rows: Int64Array  # [n] rows that return a vector, in the step's order
    ended_rows: Int64Array  # [n] rows that sample or return a vector, in the step's order
    written_blocks: Int64Array  # blocks that get a token's KV
    # int64 on the device: indices of the tokens whose logits are kept. First the last token of each sampled row,
    # then, for prompt log-probabilities, the token before each requested token. In a pass with drafts: every token.
    kept: torch.Tensor
    prompt_requests: list[LogprobsRequest]


def build_batch(
    rows: Rows,
    decoding: Int64Array,
    prefills: Int32Array,
    last_tokens: torch.Tensor,
    *,
    num_prompt_logprobs: Int64Array,
    is_pooling: BoolArray,
    drafts: Drafts | None = None,
    device_rows: DeviceRows | None = None,
) -> StepBatch | None:
    """The pass that the decoding rows and the prefills (row, number of tokens) make, None if it has no token.

    last_tokens int64 [max_rows] on the device holds what each row feeds next; num_prompt_logprobs [max_rows] is -1 for
    rows that want none; is_pooling [max_rows] marks the rows that return vectors. `drafts` are of the decoding rows, in
    a pass without prefills. `device_rows`: where the device keeps block tables; None: attention reads those of the
    host. Raises PlanRefused where a row lacks blocks, or two tokens have one KV position.
    """
    prefilled = prefills[:, 0].astype(np.int64)
    step_rows = np.concatenate([decoding, prefilled])
    if len(step_rows) == 0:
        return None
    assert drafts is None or len(prefilled) == 0, "a pass with drafts has a prefill"
    decoded = np.ones(len(decoding), dtype=np.int64) if drafts is None else 1 + drafts.counts
    counts = np.concatenate([decoded, prefills[:, 1].astype(np.int64)])
    start = np.zeros(len(counts) + 1, dtype=np.int64)
    np.cumsum(counts, out=start[1:])
    num_tokens = int(start[-1])
    computed = rows.num_computed[step_rows]
    ends = computed + counts
    check_room(rows, step_rows, ends)
    # Rows [3, 7] with 1 and 3 tokens, 8 and 4 computed: token rows [3, 7, 7, 7], positions [8, 4, 5, 6].
    token_rows = np.repeat(step_rows, counts)
    positions = np.arange(num_tokens) - np.repeat(start[:-1] - computed, counts)
    block_index, offset = np.divmod(positions, rows.block_size)
    kv_positions = rows.block_table[token_rows, block_index].astype(np.int64) * rows.block_size + offset
    check_distinct(kv_positions)
    device = last_tokens.device
    token_slots, further = rows.adapters.of_tokens(token_rows, positions)
    every = token_slots if further is None else np.concatenate([token_slots, *further.every])
    is_ending = ends >= rows.num_known[step_rows]
    is_sampling = is_ending & ~is_pooling[step_rows]
    sampled_rows = step_rows[is_sampling]
    kept = start[1:][is_sampling] - 1 if drafts is None else np.arange(num_tokens)
    prompt_requests: list[LogprobsRequest] = []
    if (num_prompt_logprobs[prefilled] >= 0).any():
        prompt_requests, indices = _requested_prompt_logprobs(
            rows, prefills, start[len(decoding) :], num_prompt_logprobs
        )
        kept = np.concatenate([kept, indices])
    of_rows, query_start, context_lens = step_rows, start, ends
    if drafts is not None:
        of_rows, query_start, context_lens = _one_by_one(token_rows, positions)
    fed = (decoding, _known(rows, prefills)) if drafts is None else (decoding, drafts.pass_ids, drafts.starts)
    position_ids, kv_positions_on_device, kept_on_device, sampled_on_device, *fed_on_device = upload_all(
        device, positions, kv_positions, kept, sampled_rows, *fed
    )
    return StepBatch(
        rows=step_rows,
        num_tokens=counts,
        starts=start[:-1],
        input_ids=_input_ids(last_tokens, *fed_on_device),
        position_ids=position_ids,
        kv_positions=kv_positions_on_device,
        attention=_attention(rows, of_rows, query_start, context_lens, device_rows),
        token_slots=torch.from_numpy(token_slots),
        slots=np.unique(every[every >= 0]).tolist(),
        kept_slots=torch.from_numpy(token_slots[kept]),
        further=further,
        kept_further=None if further is None else further.take(kept),
        sampled_rows=sampled_rows,
        sampled_on_device=sampled_on_device,
        pooled_rows=step_rows[is_ending & is_pooling[step_rows]],
        ended_rows=step_rows[is_ending],
        written_blocks=kv_positions // rows.block_size,
        kept=kept_on_device,
        prompt_requests=prompt_requests,
    )


def _attention(
    rows: Rows, of_rows: Int64Array, query_start: Int64Array, context_lens: Int64Array, device_rows: DeviceRows | None
) -> AttentionBatch:
    """Sequences over the blocks of the rows `of_rows`, which may name a row several times."""
    num_blocks = int(-(-context_lens.max() // rows.block_size))
    return AttentionBatch.build(
        torch.from_numpy(rows.block_table[of_rows, :num_blocks]),
        query_start.tolist(),
        context_lens.tolist(),
        device_tables=None if device_rows is None else device_rows.tables_of(np.unique(of_rows)),
        table_rows=None if device_rows is None else of_rows.astype(np.int32),
    )


def split_prefills(
    prefills: Int32Array, wants_logprobs: BoolArray, *, most: int
) -> tuple[list[Int32Array], Int32Array]:
    """Prefills to compute before the step's own pass, each in a pass of its own, and what is left for the step's pass.

    No pass keeps the logits of more than `most` prompt tokens. Each prefill that wants log-probabilities
    (wants_logprobs [n]) leaves an equal share of `most` to the last pass. With most=4 and [(0, 9), (1, 3)], both of
    which want them: row 0 gets passes of 4 and 3 tokens, row 1 one of 1, and [(0, 2), (1, 2)] are left.
    """
    if int(prefills[wants_logprobs, 1].sum()) <= most:
        return [], prefills
    share = max(most // int(wants_logprobs.sum()), 1)
    left = prefills.copy()
    left[wants_logprobs, 1] = np.minimum(prefills[wants_logprobs, 1], share)
    pieces = [
        np.array([[row, min(most, count - begin)]], dtype=np.int32)
        for row, count in np.stack([prefills[:, 0], prefills[:, 1] - left[:, 1]], axis=1).tolist()
        for begin in range(0, count, most)
    ]
    return pieces, left


def _known(rows: Rows, prefills: Int32Array) -> Int64Array:
    """The tokens of the prefills."""
    chunks = [np.zeros(0, dtype=np.int32)]
    for row, count in prefills.tolist():
        begin = int(rows.num_computed[row])
        chunks.append(rows.token_ids[row][begin : begin + count])
    return np.concatenate(chunks).astype(np.int64)


def _input_ids(
    last_tokens: torch.Tensor, decoding: torch.Tensor, known: torch.Tensor, first: torch.Tensor | None = None
) -> torch.Tensor:
    """Fed-back tokens of the decoding rows, then the known ones; with `first`, at these indices of the known ones."""
    fed_back = last_tokens[decoding]
    if first is None:
        return torch.cat([fed_back, known]) if len(known) else fed_back
    known[first] = fed_back
    return known


def _one_by_one(token_rows: Int64Array, positions: Int64Array) -> tuple[Int64Array, Int64Array, Int64Array]:
    """Rows, query offsets and context lengths of attention that computes every token as a decode step would.

    A row with 8 tokens computed and 2 drafts: three sequences over its blocks with one query each, of 9, 10 and 11
    keys. A layer writes the keys of all tokens before attention reads any. One sequence with three queries would take
    the kernel of prefills, which rounds otherwise in bfloat16: tokens would change.
    """
    return token_rows, np.arange(len(token_rows) + 1), positions + 1


def _requested_prompt_logprobs(
    rows: Rows, prefills: Int32Array, start: Int64Array, num_prompt_logprobs: Int64Array
) -> tuple[list[LogprobsRequest], Int64Array]:
    """The prompt tokens whose log-probabilities are requested, and the indices of the tokens before them.

    start is where each prefill begins among the step's tokens. A prompt of 5 tokens with 2 computed, in a chunk of 3:
    the logits of tokens 2 and 3 give the log-probabilities of tokens 3 and 4; the token after the last is sampled.
    """
    requests, indices = [], []
    for (row, count), begin in zip(prefills.tolist(), start.tolist(), strict=False):
        first = int(rows.num_computed[row]) + 1
        token_ids = rows.token_ids[row][first : min(first + count, int(rows.num_prompt[row]))]
        if num_prompt_logprobs[row] >= 0 and len(token_ids):
            requests.append(LogprobsRequest(row, first, token_ids, int(num_prompt_logprobs[row])))
            indices.append(np.arange(begin, begin + len(token_ids)))
    return requests, np.concatenate(indices) if indices else np.zeros(0, dtype=np.int64)


def check_room(rows: Rows, step_rows: Int64Array, ends: Int64Array) -> None:
    """Refuse rows [n] whose blocks cannot hold `ends` [n] tokens."""
    room = rows.num_row_blocks[step_rows] * rows.block_size
    if (ends > room).any():
        index = int((ends > room).argmax())
        raise PlanRefused(f"row {step_rows[index]} needs room for {ends[index]} tokens, its blocks hold {room[index]}")


def check_distinct(kv_positions: Int64Array) -> None:
    """Refuse two tokens with one KV position."""
    in_order = np.sort(kv_positions)
    if (in_order[1:] == in_order[:-1]).any():
        raise PlanRefused("two tokens of the step have one KV position: a block has two writers")
