"""What decode steps read of the rows, kept on the device.

`store_differences` brings what changed there, `decode_inputs` begins a step, `store_tokens` ends it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kernels.devices import check_devices, runs_triton
from kernels.row_state import reference

__all__ = ["DecodeInputs", "DraftTokens", "RowState", "decode_inputs", "store_differences", "store_tokens"]


@dataclass(frozen=True, slots=True)
class RowState:
    """State of R rows by row number, on one device."""

    last_tokens: torch.Tensor  # int64 [R]: what each row feeds next
    num_computed: torch.Tensor  # int32 [R]: leading tokens whose KV is in the cache
    num_prompt: torch.Tensor  # int32 [R]: tokens of the prompt
    slots: torch.Tensor  # int32 [R]: of the adapter that changes the token which each row feeds next, -1 for none
    block_tables: torch.Tensor  # int32 [R, max_blocks], rows dense


@dataclass(frozen=True, slots=True)
class DecodeInputs:
    """What a step of n rows with one token each reads. Of row -1: token 0 at position 0, KV position -1, no keys,
    slot -1."""

    input_ids: torch.Tensor  # int64 [n]
    positions: torch.Tensor  # int64 [n] in the sequence
    kv_positions: torch.Tensor  # int64 [n]: where in the cache the token's KV goes
    context_lens: torch.Tensor  # int32 [n]: KV length, this token included
    completion_index: torch.Tensor  # int64 [n]: index in the completion of the token that the step samples
    token_slots: torch.Tensor  # int32 [n]: of each token's adapter, -1 for none


@dataclass(frozen=True, slots=True)
class DraftTokens:
    """Tokens of a step that are drafts."""

    # int32 [n]: how many tokens of its row a token comes after in the step, the first 0. -1: the step has no drafts.
    ahead: torch.Tensor
    token_ids: torch.Tensor  # int32 [n] where `ahead` is above 0; elsewhere without a meaning


def decode_inputs(state: RowState, rows: torch.Tensor, block_size: int, drafts: DraftTokens) -> DecodeInputs:
    """The inputs of a step of these rows, int32 [n], each of which then has one computed token more in the state.

    No row is named twice, but for -1, which stands for no row. Row 3 with 8 tokens computed of which 5 are the prompt,
    blocks 7, 2, 9 of 4 tokens and slot 6: position 8, KV position 36, 9 keys, index 4, slot 6.

    With drafts, a row is named once for each of its tokens, and the state stays as it is: how many drafts are right is
    known later. Row 3 above with one draft: positions 8 and 9.
    """
    if rows.dtype != torch.int32 or rows.dim() != 1:
        raise ValueError(f"rows is {rows.dtype} {tuple(rows.shape)}, want int32 [n]")
    if state.block_tables.stride(1) != 1:
        raise ValueError(f"block_tables has strides {state.block_tables.stride()}, want dense rows")
    for name, tensor in (("ahead", drafts.ahead), ("token_ids", drafts.token_ids)):
        if tensor.dtype != torch.int32 or tensor.shape != rows.shape:
            raise ValueError(f"{name} is {tensor.dtype} {tuple(tensor.shape)}, want int32 {tuple(rows.shape)}")
    check_devices(
        rows=rows,
        last_tokens=state.last_tokens,
        block_tables=state.block_tables,
        ahead=drafts.ahead,
        token_ids=drafts.token_ids,
    )
    if runs_triton(rows.new_empty(0, dtype=torch.float32)):
        from kernels.row_state import triton_kernel

        return triton_kernel.decode_inputs(state, rows, block_size, drafts)
    return reference.decode_inputs(state, rows, block_size, drafts)


def store_tokens(last_tokens: torch.Tensor, rows: torch.Tensor, tokens: torch.Tensor) -> None:
    """last_tokens[rows[i]] = tokens[i] for int32 rows [n] and int64 tokens [n]; nothing for row -1."""
    if tokens.dtype != torch.int64 or tokens.shape != rows.shape:
        raise ValueError(f"tokens is {tokens.dtype} {tuple(tokens.shape)}, want int64 {tuple(rows.shape)}")
    check_devices(last_tokens=last_tokens, rows=rows, tokens=tokens)
    if runs_triton(rows.new_empty(0, dtype=torch.float32)):
        from kernels.row_state import triton_kernel

        triton_kernel.store_tokens(last_tokens, rows, tokens)
        return
    reference.store_tokens(last_tokens, rows, tokens)


def store_differences(whole: torch.Tensor, differences: torch.Tensor) -> None:
    """whole[differences[i]] = differences[n + i] for i < n, in one launch; int32 [any] and int32 [2 * n].

    No place is named twice.
    """
    for name, tensor in (("whole", whole), ("differences", differences)):
        if tensor.dtype != torch.int32 or tensor.dim() != 1 or not tensor.is_contiguous():
            raise ValueError(f"{name} is {tensor.dtype} {tuple(tensor.shape)}, want int32 [n], dense")
    if len(differences) % 2:
        raise ValueError(f"differences has {len(differences)} elements, want as many places as values")
    check_devices(whole=whole, differences=differences)
    if runs_triton(whole.new_empty(0, dtype=torch.float32)):
        from kernels.row_state import triton_kernel

        triton_kernel.store_differences(whole, differences)
        return
    reference.store_differences(whole, differences)
