"""The residual's sum and the norm of what an expand completes, in one launch, for few tokens.

A program stores what its row gets, as the expand would, and then does what the norm's program does, with as many warps.
So the bits are those of two launches.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.buckets import round_up
from kernels.fp8_rows.triton_kernel import num_warps_for
from kernels.lora.expansion import MOST_TOKENS, Expansion
from kernels.lora.segments import MIN_BLOCK_TOKENS
from kernels.lora.triton_expand import expand_token, folded_arguments
from kernels.rms_norm.triton_kernel import norm_row


@triton.jit(do_not_specialize=["num_slots", "width", "stride_hp", "stride_hs"])
def norm_expand_kernel(
    out_ptr,  # [T, HIDDEN], contiguous
    y_ptr,  # [T, HIDDEN], rows dense, read and written
    residual_ptr,  # [T, HIDDEN], read and written
    weight_ptr,  # [HIDDEN]
    rank_ptr,
    token_slots_ptr,  # int32 [T]
    num_slots,
    eps,
    weight_offset,
    stride_yt,
    stride_rt,
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
    HIDDEN: tl.constexpr,
    BLOCK_H: tl.constexpr,
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
    """What the token's adapter adds to y, then as rms_norm_kernel. Grid: (T,)."""
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(token_slots_ptr + token)
    if (slot >= 0) & (slot < num_slots):
        expand_token(
            token, slot, tl.full((), 0, tl.int32), 0, 0, HIDDEN, HIDDEN, y_ptr, rank_ptr, stride_yt, h_ptr, pages_ptr,
            page_ids_ptr, first_ptr, scaling_ptr, values_ptr, dora_scale_ptr, lora_bias_ptr, base_bias_ptr, in_tiles,
            width, stride_hp, stride_hs, stride_ht, stride_table, stride_dora_scale, stride_lora_bias, False, BLOCK_T,
            BLOCK_R, BLOCK_N, NUM_PLANES, H_ALIGN, HAS_DORA_SCALE, HAS_LORA_BIAS, HAS_BASE_BIAS, TILE_WIDTH,
            PAGE_RANKS, PAGE_VALUES, HIDDEN,
        )  # fmt: skip
        # Other threads of the program read the row.
        tl.debug_barrier()
    norm_row(
        token, out_ptr, y_ptr, residual_ptr, weight_ptr, eps, weight_offset, stride_yt, stride_rt, HIDDEN, BLOCK_H, True
    )


def tile_columns(expansion: Expansion) -> int | None:
    """Columns that a program expands at a time; None where the expand is a launch of its own."""
    num_tokens, hidden = expansion.y.shape
    if num_tokens > MOST_TOKENS or expansion.group.out_features != (hidden,):
        return None
    # A tile of 16 tokens in float32 takes 64 registers of each thread.
    return expansion.columns_of_tiles((0, hidden), most=min(128 * num_warps_for(round_up(hidden)), 1024))


def rms_norm(
    expansion: Expansion,
    weight: torch.Tensor,
    eps: float,
    residual: torch.Tensor,
    weight_offset: float,
    columns: int,
) -> torch.Tensor:
    """See the package; `columns` from tile_columns."""
    y = expansion.y
    num_tokens, hidden = y.shape
    out = torch.empty_like(y, memory_format=torch.contiguous_format)
    if num_tokens == 0:
        return out
    block = round_up(hidden)
    norm_expand_kernel[(num_tokens,)](
        out_ptr=out,
        residual_ptr=residual,
        weight_ptr=weight,
        eps=eps,
        weight_offset=weight_offset,
        stride_rt=residual.stride(0),
        **folded_arguments(expansion),
        HIDDEN=hidden,
        BLOCK_H=block,
        BLOCK_T=MIN_BLOCK_TOKENS,
        BLOCK_N=columns,
        num_warps=num_warps_for(block),
    )
    return out
