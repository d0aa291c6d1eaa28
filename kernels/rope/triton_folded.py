"""Rotation and cache write of what an expand completes, in one launch, for few tokens.

A program stores what its heads' columns get, as the expand would, and then does what the rotation's program does. So
the bits are those of two launches.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.lora.expansion import MOST_TOKENS, Expansion
from kernels.lora.segments import MIN_BLOCK_TOKENS
from kernels.lora.triton_expand import expand_token, folded_arguments
from kernels.rope.triton_kernel import BLOCK_HEADS, Store, num_tiles, rope_arguments, turn_tile

_MOST_COLUMNS = 512


@triton.jit(do_not_specialize=["num_slots", "width", "stride_hp", "stride_hs"])
def rope_expand_kernel(
    y_ptr,  # [T, query, key and value side by side], dense
    rank_ptr,
    token_slots_ptr,  # int32 [T]
    num_slots,
    stride_yt,
    # as `turn_tile` takes them
    query_ptr,
    key_ptr,
    value_ptr,
    query_weight_ptr,
    key_weight_ptr,
    positions_ptr,
    cos_ptr,
    sin_ptr,
    key_cache_ptr,
    value_cache_ptr,
    kv_positions_ptr,
    eps,
    weight_offset,
    stride_qt,
    stride_qh,
    stride_kt,
    stride_kh,
    stride_vt,
    stride_vh,
    stride_cos,
    stride_sin,
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
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    BLOCK_REST: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    QUERY_TILES: tl.constexpr,
    HAS_NORM: tl.constexpr,
    HAS_POSITIONS: tl.constexpr,
    HAS_CACHE: tl.constexpr,
    IS_JOINT: tl.constexpr,  # query, key and value are one module; else they are three
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
    """What the token's adapter adds to the columns of BLOCK_HEADS heads, then as rope_kernel. The same grid."""
    token = tl.program_id(0).to(tl.int64)
    tile = tl.program_id(1)
    slot = tl.load(token_slots_ptr + token)
    if (slot >= 0) & (slot < num_slots):
        if tile < QUERY_TILES:
            expand_token(
                token, slot, tile * (BLOCK_HEADS * DIM), 0, 0, NUM_HEADS * DIM, BLOCK_HEADS * DIM, y_ptr, rank_ptr,
                stride_yt, h_ptr, pages_ptr, page_ids_ptr, first_ptr, scaling_ptr, values_ptr, dora_scale_ptr,
                lora_bias_ptr, base_bias_ptr, in_tiles, width, stride_hp, stride_hs, stride_ht, stride_table,
                stride_dora_scale, stride_lora_bias, IS_JOINT, BLOCK_T, BLOCK_R, BLOCK_N, NUM_PLANES, H_ALIGN,
                HAS_DORA_SCALE, HAS_LORA_BIAS, HAS_BASE_BIAS, TILE_WIDTH, PAGE_RANKS, PAGE_VALUES,
                (NUM_HEADS + NUM_KV_HEADS) * DIM + NUM_KV_HEADS * VALUE_DIM,
            )  # fmt: skip
        else:
            expand_token(
                token, slot, (tile - QUERY_TILES) * (BLOCK_HEADS * DIM), 1, NUM_HEADS * DIM, NUM_KV_HEADS * DIM,
                BLOCK_HEADS * DIM, y_ptr, rank_ptr, stride_yt, h_ptr, pages_ptr, page_ids_ptr, first_ptr, scaling_ptr,
                values_ptr, dora_scale_ptr, lora_bias_ptr, base_bias_ptr, in_tiles, width, stride_hp, stride_hs,
                stride_ht, stride_table, stride_dora_scale, stride_lora_bias, IS_JOINT, BLOCK_T, BLOCK_R, BLOCK_N,
                NUM_PLANES, H_ALIGN, HAS_DORA_SCALE, HAS_LORA_BIAS, HAS_BASE_BIAS, TILE_WIDTH, PAGE_RANKS, PAGE_VALUES,
                (NUM_HEADS + NUM_KV_HEADS) * DIM + NUM_KV_HEADS * VALUE_DIM,
            )  # fmt: skip
            expand_token(
                token, slot, (tile - QUERY_TILES) * (BLOCK_HEADS * VALUE_DIM), 2, (NUM_HEADS + NUM_KV_HEADS) * DIM,
                NUM_KV_HEADS * VALUE_DIM, BLOCK_HEADS * VALUE_DIM, y_ptr, rank_ptr, stride_yt, h_ptr, pages_ptr,
                page_ids_ptr, first_ptr, scaling_ptr, values_ptr, dora_scale_ptr, lora_bias_ptr, base_bias_ptr,
                in_tiles, width, stride_hp, stride_hs, stride_ht, stride_table, stride_dora_scale, stride_lora_bias,
                IS_JOINT, BLOCK_T, BLOCK_R, BLOCK_N, NUM_PLANES, H_ALIGN, HAS_DORA_SCALE, HAS_LORA_BIAS, HAS_BASE_BIAS,
                TILE_WIDTH, PAGE_RANKS, PAGE_VALUES, (NUM_HEADS + NUM_KV_HEADS) * DIM + NUM_KV_HEADS * VALUE_DIM,
            )  # fmt: skip
        # Other threads of the program read these columns.
        tl.debug_barrier()
    turn_tile(
        token, tile, query_ptr, key_ptr, value_ptr, query_weight_ptr, key_weight_ptr, positions_ptr, cos_ptr, sin_ptr,
        key_cache_ptr, value_cache_ptr, kv_positions_ptr, eps, weight_offset, stride_qt, stride_qh, stride_kt,
        stride_kh, stride_vt, stride_vh, stride_cos, stride_sin, NUM_HEADS, NUM_KV_HEADS, DIM, VALUE_DIM, HALF,
        BLOCK_HEADS, BLOCK_HALF, BLOCK_REST, BLOCK_DV, QUERY_TILES, HAS_NORM, HAS_POSITIONS, HAS_CACHE,
    )  # fmt: skip


def tile_columns(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, expansion: Expansion, *, has_norm: bool
) -> int | None:
    """Columns of y that a program expands at a time; None where the expand is a launch of its own.

    Heads with a norm are not folded: the order of its sums follows the warps of a program, of which these have more.
    """
    y = expansion.y
    if has_norm or len(y) > MOST_TOKENS or not _are_columns(y, query, key, value):
        return None
    widths = tuple(part.shape[1] * part.shape[2] for part in (query, key, value))
    if expansion.group.out_features not in (widths, (sum(widths),)):
        return None
    runs = ((0, widths[0]), (widths[0], widths[1]), (widths[0] + widths[1], widths[2]))
    columns = expansion.columns_of_tiles(*runs, most=_MOST_COLUMNS)
    for dim in (query.shape[2], value.shape[2]):
        of_heads = BLOCK_HEADS * dim
        columns = None if columns is None else min(columns, of_heads & -of_heads)
    return columns if columns is not None and columns >= 16 else None


def _are_columns(y: torch.Tensor, *parts: torch.Tensor) -> bool:
    """Whether the parts [T, heads, size] are y's columns, in order."""
    place = y.data_ptr()
    for part in parts:
        strides = zip(part.shape, part.stride(), (y.stride(0), part.shape[2], 1), strict=True)
        if part.data_ptr() != place or any(count > 1 and found != wanted for count, found, wanted in strides):
            return False
        place += part.shape[1] * part.shape[2] * part.element_size()
    return True


def apply_rope(
    query: torch.Tensor,
    key: torch.Tensor,
    positions: torch.Tensor | None,
    cos: torch.Tensor,
    sin: torch.Tensor,
    store: Store,
    expansion: Expansion,
    columns: int,
) -> None:
    """Add the expansion, rotate and store; `columns` from tile_columns."""
    y = expansion.y
    if len(y) == 0:
        return
    rope_expand_kernel[(len(y), num_tiles(query, key))](
        **rope_arguments(query, key, positions, cos, sin, None, store),
        **folded_arguments(expansion),
        IS_JOINT=expansion.group.num_modules == 1,
        BLOCK_T=MIN_BLOCK_TOKENS,
        BLOCK_N=columns,
        num_warps=4,
    )
