"""row_state on the GPU, for any number of rows: one launch before a step's layers and one after them, and one more
where rows changed."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton.language as tl

from kernels.buckets import ceil_div
from kernels.triton_launch import kernel

if TYPE_CHECKING:
    from kernels.row_state import DecodeInputs, DraftTokens, RowState

BLOCK = 128


@kernel(do_not_specialize=["num_tokens", "stride_table"])
def decode_inputs_kernel(
    longs_ptr,  # int64 [4, num_tokens]: input ids, positions, KV positions, completion index
    context_lens_ptr,  # int32 [num_tokens]
    token_slots_ptr,  # int32 [num_tokens]
    rows_ptr,  # int32 [num_tokens], -1 for no row
    last_tokens_ptr,  # int64 [R]
    num_computed_ptr,  # int32 [R], advanced by one
    num_prompt_ptr,  # int32 [R]
    slots_ptr,  # int32 [R]
    tables_ptr,  # int32 [R, max_blocks]
    ahead_ptr,  # int32 [num_tokens]
    draft_ids_ptr,  # int32 [num_tokens]
    num_tokens,
    stride_table,
    BLOCK_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """position = computed of the row + the tokens that come before it in the step.

    KV position = table[row, position // BLOCK_SIZE] * BLOCK_SIZE + position % BLOCK_SIZE. Grid: (ceil(num_tokens /
    BLOCK),). Integers only. Each program advances its own rows; in a step with drafts none does, since several may read
    a row.
    """
    offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    is_inside = offs < num_tokens
    row = tl.load(rows_ptr + offs, mask=is_inside, other=-1).to(tl.int64)
    is_row = row >= 0
    computed = tl.load(num_computed_ptr + row, mask=is_row, other=0)
    position = computed.to(tl.int64)
    ahead = tl.load(ahead_ptr + offs, mask=is_inside, other=-1)
    position += tl.where(is_row, tl.maximum(ahead, 0), 0)
    draft = tl.load(draft_ids_ptr + offs, mask=is_inside, other=0).to(tl.int64)
    token = tl.where(is_row & (ahead > 0), draft, tl.load(last_tokens_ptr + row, mask=is_row, other=0))
    prompt = tl.load(num_prompt_ptr + row, mask=is_row, other=0).to(tl.int64)
    block = tl.load(tables_ptr + row * stride_table + position // BLOCK_SIZE, mask=is_row, other=0).to(tl.int64)
    tl.store(longs_ptr + offs, token, mask=is_inside)
    tl.store(longs_ptr + num_tokens + offs, position, mask=is_inside)
    kv_position = tl.where(is_row, block * BLOCK_SIZE + position % BLOCK_SIZE, -1)
    tl.store(longs_ptr + 2 * num_tokens + offs, kv_position, mask=is_inside)
    tl.store(longs_ptr + 3 * num_tokens + offs, tl.where(is_row, position + 1 - prompt, 0), mask=is_inside)
    tl.store(context_lens_ptr + offs, tl.where(is_row, position + 1, 0).to(tl.int32), mask=is_inside)
    tl.store(token_slots_ptr + offs, tl.load(slots_ptr + row, mask=is_row, other=-1), mask=is_inside)
    tl.store(num_computed_ptr + row, computed + 1, mask=is_row & (ahead < 0))


@kernel(do_not_specialize=["num_tokens"])
def store_tokens_kernel(
    last_tokens_ptr,  # int64 [R]
    rows_ptr,  # int32 [num_tokens], -1 for no row
    tokens_ptr,  # int64 [num_tokens]
    num_tokens,
    BLOCK: tl.constexpr,
):
    """last_tokens[rows] = tokens. Grid: (ceil(num_tokens / BLOCK),)."""
    offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    is_inside = offs < num_tokens
    row = tl.load(rows_ptr + offs, mask=is_inside, other=-1).to(tl.int64)
    token = tl.load(tokens_ptr + offs, mask=is_inside, other=0)
    tl.store(last_tokens_ptr + row, token, mask=row >= 0)


@kernel(do_not_specialize=["num_differences"])
def store_differences_kernel(
    whole_ptr,  # int32
    differences_ptr,  # int32 [2, num_differences]: places, values
    num_differences,
    BLOCK: tl.constexpr,
):
    """whole[places] = values. Grid: (ceil(num_differences / BLOCK),)."""
    offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    is_inside = offs < num_differences
    place = tl.load(differences_ptr + offs, mask=is_inside, other=0).to(tl.int64)
    value = tl.load(differences_ptr + num_differences + offs, mask=is_inside, other=0)
    tl.store(whole_ptr + place, value, mask=is_inside)


def decode_inputs(state: RowState, rows: torch.Tensor, block_size: int, drafts: DraftTokens) -> DecodeInputs:
    """See the package."""
    from kernels.row_state import DecodeInputs

    num_tokens = len(rows)
    longs = torch.empty(4, num_tokens, dtype=torch.int64, device=rows.device)
    context_lens, token_slots = (torch.empty(num_tokens, dtype=torch.int32, device=rows.device) for _ in range(2))
    if num_tokens:
        decode_inputs_kernel[(ceil_div(num_tokens, BLOCK),)](
            longs,
            context_lens,
            token_slots,
            rows,
            state.last_tokens,
            state.num_computed,
            state.num_prompt,
            state.slots,
            state.block_tables,
            drafts.ahead,
            drafts.token_ids,
            num_tokens,
            state.block_tables.stride(0),
            BLOCK_SIZE=block_size,
            BLOCK=BLOCK,
        )
    input_ids, positions, kv_positions, completion_index = longs.unbind(0)
    return DecodeInputs(input_ids, positions, kv_positions, context_lens, completion_index, token_slots)


def store_tokens(last_tokens: torch.Tensor, rows: torch.Tensor, tokens: torch.Tensor) -> None:
    """See the package."""
    if len(rows):
        store_tokens_kernel[(ceil_div(len(rows), BLOCK),)](last_tokens, rows, tokens, len(rows), BLOCK=BLOCK)


def store_differences(whole: torch.Tensor, differences: torch.Tensor) -> None:
    """See the package."""
    count = len(differences) // 2
    if count:
        store_differences_kernel[(ceil_div(count, BLOCK),)](whole, differences, count, BLOCK=BLOCK)
