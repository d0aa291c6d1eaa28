"""Lays the rows of one step out as the packed tensors that the model takes. Vector operations, no loop over rows."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from data_plane.engine.rows import Int64Array, Rows
from data_plane.errors import PlanRefused
from data_plane.plan import Int32Array
from kernels.paged_attention import AttentionBatch
from kernels.sampling import SamplingRows


@dataclass(frozen=True, slots=True)
class StepBatch:
    """One step. A sequence is one row's tokens of the step; sequences follow one another."""

    rows: Int64Array  # [num_seqs] decoding rows ascending, then prefills in the plan's order
    num_tokens: Int64Array  # [num_seqs] tokens of each
    input_ids: torch.Tensor  # int64 [T] on the device
    position_ids: torch.Tensor  # int64 [T] on the device
    slot_mapping: torch.Tensor  # int64 [T] on the device: place of each token's KV in the cache
    attention: AttentionBatch
    token_slots: torch.Tensor  # int32 [T] on the host: adapter slot of each token, -1 for none
    slots: list[int]  # adapter slots in the step
    sampled_rows: Int64Array  # [n] rows that sample, in the step's order
    sampled_at: torch.Tensor  # int64 [n] on the device: their last tokens among the T
    sampling: SamplingRows | None  # None: all of them greedy


def build_batch(
    rows: Rows, prefills: Int32Array, last_tokens: torch.Tensor, *, max_step_tokens: int
) -> StepBatch | None:
    """The step that the rows and the plan's prefills make, None if it has no token.

    last_tokens int64 [max_rows] on the device holds what each row sampled last. Raises PlanRefused where the step
    is larger than max_step_tokens, a row lacks blocks, or two tokens would be written to one place.
    """
    decoding = np.flatnonzero(rows.is_decoding & ~rows.is_paused)
    prefilled = prefills[:, 0].astype(np.int64)
    step_rows = np.concatenate([decoding, prefilled])
    if len(step_rows) == 0:
        return None
    counts = np.concatenate([np.ones(len(decoding), dtype=np.int64), prefills[:, 1].astype(np.int64)])
    start = np.zeros(len(counts) + 1, dtype=np.int64)
    np.cumsum(counts, out=start[1:])
    num_tokens = int(start[-1])
    if num_tokens > max_step_tokens:
        raise PlanRefused(f"the step has {num_tokens} tokens, at most {max_step_tokens} are allowed")
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
    num_table_blocks = int(-(-ends.max() // rows.block_size))
    return StepBatch(
        rows=step_rows,
        num_tokens=counts,
        input_ids=_input_ids(rows, prefills, decoding, last_tokens),
        position_ids=torch.from_numpy(positions).to(device),
        slot_mapping=torch.from_numpy(places).to(device),
        attention=AttentionBatch.build(
            torch.from_numpy(rows.block_table[step_rows, :num_table_blocks]), start.tolist(), ends.tolist()
        ),
        token_slots=torch.from_numpy(token_slots),
        slots=np.unique(token_slots[token_slots >= 0]).tolist(),
        sampled_rows=sampled_rows,
        sampled_at=torch.from_numpy(start[1:][is_sampling] - 1).to(device),
        sampling=_sampling(rows, sampled_rows, device),
    )


def _input_ids(rows: Rows, prefills: Int32Array, decoding: Int64Array, last_tokens: torch.Tensor) -> torch.Tensor:
    """Fed-back tokens of the decoding rows, then the prefills' known tokens."""
    fed_back = last_tokens[torch.from_numpy(decoding).to(last_tokens.device)]
    if len(prefills) == 0:
        return fed_back
    chunks = []
    for row, count in prefills.tolist():
        begin = int(rows.num_computed[row])
        chunks.append(rows.token_ids[row][begin : begin + count])
    known = torch.from_numpy(np.concatenate(chunks).astype(np.int64)).to(last_tokens.device)
    return torch.cat([fed_back, known])


def _sampling(rows: Rows, sampled: Int64Array, device: torch.device) -> SamplingRows | None:
    temperature = rows.temperature[sampled]
    if not temperature.any():
        return None
    return SamplingRows(
        temperature=torch.from_numpy(temperature).to(device),
        top_k=torch.from_numpy(rows.top_k[sampled]).to(device),
        top_p=torch.from_numpy(rows.top_p[sampled]).to(device),
        min_p=torch.zeros(len(sampled), device=device),
        seed=torch.from_numpy(rows.seed[sampled]).to(device),
        # The token to be sampled is the one behind all known ones.
        position=torch.from_numpy(rows.num_known[sampled] - rows.num_prompt[sampled]).to(device),
        has_top_k=bool(rows.top_k[sampled].any()),
        has_top_p=bool((rows.top_p[sampled] < 1).any()),
        has_min_p=False,
    )


def _check_room(rows: Rows, step_rows: Int64Array, ends: Int64Array) -> None:
    room = rows.num_row_blocks[step_rows] * rows.block_size
    if (ends > room).any():
        at = int((ends > room).argmax())
        raise PlanRefused(f"row {step_rows[at]} needs room for {ends[at]} tokens, its blocks hold {room[at]}")


def _check_distinct(places: Int64Array) -> None:
    in_order = np.sort(places)
    if (in_order[1:] == in_order[:-1]).any():
        raise PlanRefused("two tokens of the step would be written to one place: a block has two writers")
