"""Lays the rows of one step out as the packed tensors that the model takes. Vector operations, no loop over rows."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from data_plane.engine.logprobs import Asked
from data_plane.engine.rows import BoolArray, Int64Array, Rows
from data_plane.errors import PlanRefused
from data_plane.plan import Int32Array
from kernels.devices import upload
from kernels.paged_attention import AttentionBatch


@dataclass(frozen=True, slots=True)
class StepBatch:
    """One forward pass. A sequence is one row's tokens of the pass; sequences follow one another."""

    rows: Int64Array  # [num_seqs] decoding rows ascending, then prefills in the plan's order
    num_tokens: Int64Array  # [num_seqs] tokens of each
    input_ids: torch.Tensor  # int64 [T] on the device
    position_ids: torch.Tensor  # int64 [T] on the device
    kv_positions: torch.Tensor  # int64 [T] on the device: place of each token's KV in the cache
    attention: AttentionBatch
    token_slots: torch.Tensor  # int32 [T] on the host: adapter slot of each token, -1 for none
    slots: list[int]  # adapter slots in the step
    kept_slots: torch.Tensor  # int32 on the host: those of the tokens that `kept` names
    sampled_rows: Int64Array  # [n] rows that sample, in the step's order
    written_blocks: Int64Array  # blocks that get a token's KV
    # int64 on the device, places among the T whose logits are wanted: the n sampled rows' last tokens, then the tokens
    # before those whose log-probabilities are asked for.
    kept: torch.Tensor
    prompt_asked: list[Asked]


def build_batch(
    rows: Rows,
    decoding: Int64Array,
    prefills: Int32Array,
    last_tokens: torch.Tensor,
    *,
    num_prompt_logprobs: Int64Array,
) -> StepBatch | None:
    """The pass that the decoding rows and the prefills (row, number of tokens) make, None if it has no token.

    last_tokens int64 [max_rows] on the device holds what each row feeds next; num_prompt_logprobs [max_rows] is -1 for
    rows that want none. Raises PlanRefused where a row lacks blocks, or two tokens would be written to one place.
    """
    prefilled = prefills[:, 0].astype(np.int64)
    step_rows = np.concatenate([decoding, prefilled])
    if len(step_rows) == 0:
        return None
    counts = np.concatenate([np.ones(len(decoding), dtype=np.int64), prefills[:, 1].astype(np.int64)])
    start = np.zeros(len(counts) + 1, dtype=np.int64)
    np.cumsum(counts, out=start[1:])
    num_tokens = int(start[-1])
    computed = rows.num_computed[step_rows]
    ends = computed + counts
    _check_room(rows, step_rows, ends)
    # Rows [3, 7] with 1 and 3 tokens, 8 and 4 computed: token rows [3, 7, 7, 7], positions [8, 4, 5, 6].
    token_rows = np.repeat(step_rows, counts)
    positions = np.arange(num_tokens) - np.repeat(start[:-1] - computed, counts)
    block_index, offset = np.divmod(positions, rows.block_size)
    places = rows.block_table[token_rows, block_index].astype(np.int64) * rows.block_size + offset
    _check_distinct(places)
    device = last_tokens.device
    token_slots = rows.slot[token_rows]
    is_sampling = ends == rows.num_known[step_rows]
    sampled_rows = step_rows[is_sampling]
    kept = start[1:][is_sampling] - 1
    prompt_asked: list[Asked] = []
    if (num_prompt_logprobs[prefilled] >= 0).any():
        prompt_asked, at = _prompt_asked(rows, prefills, start[len(decoding) :], num_prompt_logprobs)
        kept = np.concatenate([kept, at])
    num_table_blocks = int(-(-ends.max() // rows.block_size))
    return StepBatch(
        rows=step_rows,
        num_tokens=counts,
        input_ids=_input_ids(rows, prefills, decoding, last_tokens),
        position_ids=upload(positions, device),
        kv_positions=upload(places, device),
        attention=AttentionBatch.build(
            torch.from_numpy(rows.block_table[step_rows, :num_table_blocks]), start.tolist(), ends.tolist()
        ),
        token_slots=torch.from_numpy(token_slots),
        slots=np.unique(token_slots[token_slots >= 0]).tolist(),
        kept_slots=torch.from_numpy(token_slots[kept]),
        sampled_rows=sampled_rows,
        written_blocks=places // rows.block_size,
        kept=upload(kept, device),
        prompt_asked=prompt_asked,
    )


def split_prefills(prefills: Int32Array, asks: BoolArray, *, most: int) -> tuple[list[Int32Array], Int32Array]:
    """Prefills to be computed before the step's own pass, each a pass of its own, and what is left for that.

    So that a pass keeps logits of at most `most` prompt tokens, the longer prefills that ask for them (asks [n]) leave
    no more than their share of it to the last pass. With most=4, [(0, 9), (1, 3)] of which both ask: row 0 in passes of
    4 and 3, row 1 in one of 1, and [(0, 2), (1, 2)] are left.
    """
    if int(prefills[asks, 1].sum()) <= most:
        return [], prefills
    share = max(most // int(asks.sum()), 1)
    left = prefills.copy()
    left[asks, 1] = np.minimum(prefills[asks, 1], share)
    pieces = [
        np.array([[row, min(most, count - begin)]], dtype=np.int32)
        for row, count in np.stack([prefills[:, 0], prefills[:, 1] - left[:, 1]], axis=1).tolist()
        for begin in range(0, count, most)
    ]
    return pieces, left


def _input_ids(rows: Rows, prefills: Int32Array, decoding: Int64Array, last_tokens: torch.Tensor) -> torch.Tensor:
    """Fed-back tokens of the decoding rows, then the prefills' known tokens."""
    fed_back = last_tokens[upload(decoding, last_tokens.device)]
    if len(prefills) == 0:
        return fed_back
    chunks = []
    for row, count in prefills.tolist():
        begin = int(rows.num_computed[row])
        chunks.append(rows.token_ids[row][begin : begin + count])
    known = upload(np.concatenate(chunks).astype(np.int64), last_tokens.device)
    return torch.cat([fed_back, known])


def _prompt_asked(
    rows: Rows, prefills: Int32Array, start: Int64Array, num_prompt_logprobs: Int64Array
) -> tuple[list[Asked], Int64Array]:
    """The prompt tokens that follow computed ones, of the rows that want them told, and the places of the computed.

    start is where each prefill begins among the step's tokens. Of a prompt of 5 tokens, 2 computed: a chunk of 3 is
    followed by the prompt's tokens 3 and 4; what follows its last token is sampled.
    """
    asked, at = [], []
    for (row, count), begin in zip(prefills.tolist(), start.tolist(), strict=False):
        first = int(rows.num_computed[row]) + 1
        token_ids = rows.token_ids[row][first : min(first + count, int(rows.num_prompt[row]))]
        if num_prompt_logprobs[row] >= 0 and len(token_ids):
            asked.append(Asked(row, first, token_ids, int(num_prompt_logprobs[row])))
            at.append(np.arange(begin, begin + len(token_ids)))
    return asked, np.concatenate(at) if at else np.zeros(0, dtype=np.int64)


def _check_room(rows: Rows, step_rows: Int64Array, ends: Int64Array) -> None:
    room = rows.num_row_blocks[step_rows] * rows.block_size
    if (ends > room).any():
        at = int((ends > room).argmax())
        raise PlanRefused(f"row {step_rows[at]} needs room for {ends[at]} tokens, its blocks hold {room[at]}")


def _check_distinct(places: Int64Array) -> None:
    in_order = np.sort(places)
    if (in_order[1:] == in_order[:-1]).any():
        raise PlanRefused("two tokens of the step would be written to one place: a block has two writers")
