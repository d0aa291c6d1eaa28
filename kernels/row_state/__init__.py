"""What decode steps read of the rows, kept on the device: `decode_inputs` begins a step, `store_tokens` ends it."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kernels.devices import check_devices, runs_triton
from kernels.row_state import reference

__all__ = ["DecodeInputs", "RowState", "decode_inputs", "store_tokens"]


@dataclass(frozen=True, slots=True)
class RowState:
    """State of R rows by row number, on one device."""

    last_tokens: torch.Tensor  # int64 [R]: what each row feeds next
    num_computed: torch.Tensor  # int32 [R]: leading tokens whose KV is in the cache
    num_prompt: torch.Tensor  # int32 [R]: tokens of the prompt
    block_tables: torch.Tensor  # int32 [R, max_blocks], rows dense


@dataclass(frozen=True, slots=True)
class DecodeInputs:
    """What a step of n rows with one token each reads. Of row -1: token 0 at position 0, KV position -1, no keys."""

    input_ids: torch.Tensor  # int64 [n]
    positions: torch.Tensor  # int64 [n] in the sequence
    kv_positions: torch.Tensor  # int64 [n]: where in the cache the token's KV goes
    context_lens: torch.Tensor  # int32 [n]: KV length, this token included
    completion_index: torch.Tensor  # int64 [n]: index in the completion of the token that the step samples


def decode_inputs(state: RowState, rows: torch.Tensor, block_size: int) -> DecodeInputs:
    """The inputs of a step of these rows, int32 [n], each of which then has one computed token more in the state.

    No row is named twice, but for -1, which stands for no row. Row 3 with 8 tokens computed of which 5 are the prompt,
    blocks 7, 2, 9 of 4 tokens: position 8, KV position 36, 9 keys, index 4.
    """
    if rows.dtype != torch.int32 or rows.dim() != 1:
        raise ValueError(f"rows is {rows.dtype} {tuple(rows.shape)}, want int32 [n]")
    if state.block_tables.stride(1) != 1:
        raise ValueError(f"block_tables has strides {state.block_tables.stride()}, want dense rows")
    check_devices(rows=rows, last_tokens=state.last_tokens, block_tables=state.block_tables)
    if runs_triton(rows.new_empty(0, dtype=torch.float32)):
        from kernels.row_state import triton_kernel

        return triton_kernel.decode_inputs(state, rows, block_size)
    return reference.decode_inputs(state, rows, block_size)


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
