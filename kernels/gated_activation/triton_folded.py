"""gated_activation of what an expand completes, in one launch. Blocks of tokens of one slot share what they read.

The values are rounded where the expand would have stored them, so the bits are those of two launches.
"""

from __future__ import annotations

import torch
import triton.language as tl

from kernels.buckets import ceil_div
from kernels.gated_activation.triton_kernel import gated
from kernels.lora.expansion import Expansion
from kernels.lora.segments import padded_block_tokens
from kernels.lora.triton_expand import expanded, folded_arguments
from kernels.lora.triton_pages import block_tokens
from kernels.triton_launch import kernel


@kernel(do_not_specialize=["num_tokens", "num_blocks", "num_slots", "width", "stride_hp", "stride_hs"])
def gate_expand_kernel(
    out_ptr,  # [T, WIDTH], contiguous
    y_ptr,  # [T, 2 WIDTH], dense
    rank_ptr,
    order_ptr,
    block_slot_ptr,
    block_start_ptr,
    block_end_ptr,
    token_slots_ptr,  # int32 [T]
    num_tokens,
    num_blocks,
    num_slots,
    stride_yt,
    # as `expanded` takes them
    h_ptr,
    pages_ptr,
    page_ids_ptr,
    first_ptr,
    scaling_ptr,
    values_ptr,
    dora_scale_ptr,
    lora_bias_ptr,
    base_bias_ptr,
    in_tiles,
    width,
    stride_hp,
    stride_hs,
    stride_ht,
    stride_table,
    stride_dora_scale,
    stride_lora_bias,
    WIDTH: tl.constexpr,
    IS_JOINT: tl.constexpr,  # gate and up are one module; else they are two
    ACTIVATION: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_N: tl.constexpr,
    NUM_PLANES: tl.constexpr,
    H_ALIGN: tl.constexpr,
    HAS_DORA_SCALE: tl.constexpr,
    HAS_LORA_BIAS: tl.constexpr,
    HAS_BASE_BIAS: tl.constexpr,
    TILE_WIDTH: tl.constexpr,
    PAGE_RANKS: tl.constexpr,
    PAGE_VALUES: tl.constexpr,
):
    """out = activation(gate) * up of y + what its adapter adds, rounded to y's dtype before.

    Grid: [blocks + runs of BLOCK_T tokens, column tiles]. The programs of runs compute tokens without an adapter.
    """
    block = tl.program_id(0)
    column = tl.program_id(1) * BLOCK_N
    if block < num_blocks:
        slot = tl.load(block_slot_ptr + block)
        tokens, is_token = block_tokens(order_ptr, block_start_ptr, block_end_ptr, block, BLOCK_T)
        is_token = is_token & (slot >= 0) & (slot < num_slots)
    else:
        slot = -1
        run = (block - num_blocks) * BLOCK_T + tl.arange(0, BLOCK_T)
        is_token = run < num_tokens
        own = tl.load(token_slots_ptr + run, mask=is_token, other=0)
        is_token = is_token & ((own < 0) | (own >= num_slots))
        tokens = run.to(tl.int64)
    if tl.max(is_token.to(tl.int32), 0) > 0:
        offs_n = column + tl.arange(0, BLOCK_N)
        is_y = is_token[:, None] & (offs_n < WIDTH)[None, :]
        rows_ptr = y_ptr + tokens * stride_yt
        gate = tl.load(rows_ptr[:, None] + offs_n[None, :], mask=is_y, other=0.0).to(tl.float32)
        up = tl.load(rows_ptr[:, None] + (WIDTH + offs_n)[None, :], mask=is_y, other=0.0).to(tl.float32)
        if slot >= 0:
            first = tl.full((), 0, tl.int32)
            last = tl.full((), 0 if IS_JOINT else 1, tl.int32)
            out_features = 2 * WIDTH if IS_JOINT else WIDTH
            up_column = column + (WIDTH if IS_JOINT else 0)
            rank = tl.load(rank_ptr + slot)
            if rank > 0:
                gate = expanded(
                    gate, tokens, is_token, slot, first, rank, column, out_features, offs_n, h_ptr, pages_ptr,
                    page_ids_ptr, first_ptr, scaling_ptr, values_ptr, dora_scale_ptr, lora_bias_ptr, base_bias_ptr,
                    in_tiles, width, stride_hp, stride_hs, stride_ht, stride_table, stride_dora_scale,
                    stride_lora_bias, BLOCK_T, BLOCK_R, BLOCK_N, NUM_PLANES, H_ALIGN, True, HAS_DORA_SCALE,
                    HAS_LORA_BIAS, HAS_BASE_BIAS, TILE_WIDTH, PAGE_RANKS, PAGE_VALUES,
                ).to(y_ptr.dtype.element_ty).to(tl.float32)  # fmt: skip
            rank = tl.load(rank_ptr + last * stride_table + slot)
            if rank > 0:
                up = expanded(
                    up, tokens, is_token, slot, last, rank, up_column, out_features, WIDTH + offs_n, h_ptr, pages_ptr,
                    page_ids_ptr, first_ptr, scaling_ptr, values_ptr, dora_scale_ptr, lora_bias_ptr, base_bias_ptr,
                    in_tiles, width, stride_hp, stride_hs, stride_ht, stride_table, stride_dora_scale,
                    stride_lora_bias, BLOCK_T, BLOCK_R, BLOCK_N, NUM_PLANES, H_ALIGN, True, HAS_DORA_SCALE,
                    HAS_LORA_BIAS, HAS_BASE_BIAS, TILE_WIDTH, PAGE_RANKS, PAGE_VALUES,
                ).to(y_ptr.dtype.element_ty).to(tl.float32)  # fmt: skip
        out_at = out_ptr + (tokens * WIDTH)[:, None] + offs_n[None, :]
        tl.store(out_at, gated(gate, up, ACTIVATION).to(out_ptr.dtype.element_ty), mask=is_y)


def tile_columns(expansion: Expansion) -> int | None:
    """Columns of one program; None where gate and up cannot be expanded here."""
    width, rest = divmod(expansion.y.shape[1], 2)
    if rest or expansion.group.out_features not in ((width, width), (2 * width,)):
        return None
    return expansion.columns_of_tiles((0, width), (width, width))


def gated_activation(expansion: Expansion, activation: str, columns: int) -> torch.Tensor:
    """[T, n] of expansion.y [T, 2 n]; `columns` from tile_columns."""
    y, group, segments = expansion.y, expansion.group, expansion.segments
    num_tokens, width = y.shape[0], y.shape[1] // 2
    out = torch.empty(num_tokens, width, dtype=y.dtype, device=y.device)
    if out.numel() == 0:
        return out
    rows = padded_block_tokens(segments.block_tokens)
    gate_expand_kernel[(segments.num_blocks + ceil_div(num_tokens, rows), ceil_div(width, columns))](
        out_ptr=out,
        order_ptr=segments.order,
        block_slot_ptr=segments.block_slot,
        block_start_ptr=segments.block_start,
        block_end_ptr=segments.block_end,
        num_tokens=num_tokens,
        num_blocks=segments.num_blocks,
        **folded_arguments(expansion),
        WIDTH=width,
        IS_JOINT=group.num_modules == 1,
        ACTIVATION=activation,
        BLOCK_T=rows,
        BLOCK_N=columns,
        num_warps=4,
    )
    return out
