"""store_kv on the GPU: one launch for keys and values, no wait for the device.

The grids are (tokens, chunks of one token's values) and, where each head has a scale, (tokens, heads): they depend on
shapes alone, and a skipped token's programs end at once.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.buckets import ceil_div, round_up
from kernels.fp8 import FP8, MIN_SCALE, KVScale
from kernels.fp8_rows.triton_kernel import saturate, scaled_row
from kernels.triton_launch import kernel

MAX_CHUNK = 2048


@triton.jit
def _store_one(
    tokens_ptr,
    cache_ptr,
    token,
    kv_position,
    inverse_scale,
    stride_token,
    stride_head,
    stride_dim,
    offs,
    NUM_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    IS_FP8: tl.constexpr,
):
    """Copy the elements offs of one token [NUM_HEADS, DIM] to its KV position; offsets past the token are masked."""
    heads = offs // DIM
    dims = offs - heads * DIM
    is_inside = offs < NUM_HEADS * DIM
    source = token.to(tl.int64) * stride_token + heads.to(tl.int64) * stride_head + dims.to(tl.int64) * stride_dim
    values = tl.load(tokens_ptr + source, mask=is_inside)
    if IS_FP8:
        values = saturate(values.to(tl.float32) * inverse_scale)
    # The caches are contiguous: position p, in block p // block_size, begins at p * NUM_HEADS * DIM.
    target = kv_position * (NUM_HEADS * DIM) + offs
    tl.store(cache_ptr + target, values.to(cache_ptr.dtype.element_ty), mask=is_inside)


@kernel
def store_kv_kernel(
    # pointers
    key_ptr,  # [T, Hkv, D]
    value_ptr,  # [T, Hkv, Dv]
    key_cache_ptr,  # [num_blocks, block_size, Hkv, D], contiguous
    value_cache_ptr,
    kv_positions_ptr,  # int64 [T]
    # read only if IS_FP8
    inverse_key_scale,
    inverse_value_scale,
    # strides, in elements
    stride_kv_position,
    stride_kt,
    stride_kh,
    stride_kd,
    stride_vt,
    stride_vh,
    stride_vd,
    # sizes
    NUM_HEADS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    CHUNK: tl.constexpr,
    IS_FP8: tl.constexpr,
):
    """key_cache[kv_positions[t]] = key[t] and value_cache[kv_positions[t]] = value[t] where kv_positions[t] >= 0."""
    token = tl.program_id(0)
    kv_position = tl.load(kv_positions_ptr + token.to(tl.int64) * stride_kv_position)
    if kv_position >= 0:
        offs = tl.program_id(1) * CHUNK + tl.arange(0, CHUNK)
        _store_one(
            key_ptr, key_cache_ptr, token, kv_position, inverse_key_scale, stride_kt, stride_kh, stride_kd, offs,
            NUM_HEADS, KEY_DIM, IS_FP8,
        )  # fmt: skip
        _store_one(
            value_ptr, value_cache_ptr, token, kv_position, inverse_value_scale, stride_vt, stride_vh, stride_vd, offs,
            NUM_HEADS, VALUE_DIM, IS_FP8,
        )  # fmt: skip


@triton.jit
def _store_head(
    tokens_ptr,  # at the token's head
    cache_ptr,
    scale_ptr,  # float32 [kv_positions, NUM_HEADS]
    place,  # int64: kv_position * NUM_HEADS + head
    stride_dim,
    MIN_SCALE: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Choose the head's scale and store both."""
    offs = tl.arange(0, BLOCK_D)
    values = tl.load(tokens_ptr + offs.to(tl.int64) * stride_dim, mask=offs < DIM, other=0.0).to(tl.float32)
    scale, codes = scaled_row(values, MIN_SCALE)
    tl.store(scale_ptr + place, scale)
    tl.store(cache_ptr + place * DIM + offs, codes.to(cache_ptr.dtype.element_ty), mask=offs < DIM)


@kernel
def store_scaled_kernel(
    # pointers, as in store_kv_kernel
    key_ptr,
    value_ptr,
    key_cache_ptr,
    value_cache_ptr,
    key_scale_ptr,  # float32 [num_blocks, block_size, Hkv], contiguous
    value_scale_ptr,
    kv_positions_ptr,
    # strides, in elements
    stride_kv_position,
    stride_kt,
    stride_kh,
    stride_kd,
    stride_vt,
    stride_vh,
    stride_vd,
    # sizes
    MIN_SCALE: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
):
    """scale = max(max |x|, 448 MIN_SCALE) / 448 over one head's x, cache = x / scale. Grid: (T, Hkv)."""
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1).to(tl.int64)
    kv_position = tl.load(kv_positions_ptr + token * stride_kv_position)
    if kv_position >= 0:
        place = kv_position * tl.num_programs(1) + head
        _store_head(
            key_ptr + token * stride_kt + head * stride_kh, key_cache_ptr, key_scale_ptr, place, stride_kd, MIN_SCALE,
            KEY_DIM, BLOCK_D,
        )  # fmt: skip
        _store_head(
            value_ptr + token * stride_vt + head * stride_vh, value_cache_ptr, value_scale_ptr, place, stride_vd,
            MIN_SCALE, VALUE_DIM, BLOCK_DV,
        )  # fmt: skip


def store_kv(
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    kv_positions: torch.Tensor,
    key_scale: KVScale = 1.0,
    value_scale: KVScale = 1.0,
) -> None:
    """See the package."""
    num_tokens, num_heads, key_dim = key.shape
    value_dim = value.shape[2]
    width = num_heads * max(key_dim, value_dim)
    if num_tokens == 0 or width == 0:
        return
    if isinstance(key_scale, torch.Tensor):
        store_scaled_kernel[(num_tokens, num_heads)](
            key,
            value,
            key_cache,
            value_cache,
            key_scale,
            value_scale,
            kv_positions,
            kv_positions.stride(0),
            *key.stride(),
            *value.stride(),
            MIN_SCALE=MIN_SCALE,
            KEY_DIM=key_dim,
            VALUE_DIM=value_dim,
            BLOCK_D=round_up(key_dim),
            BLOCK_DV=round_up(value_dim),
            num_warps=1,
        )
        return
    assert not isinstance(value_scale, torch.Tensor), "check_scales lets no mixture pass"
    chunk = min(round_up(width), MAX_CHUNK)
    store_kv_kernel[(num_tokens, ceil_div(width, chunk))](
        key,
        value,
        key_cache,
        value_cache,
        kv_positions,
        1 / key_scale,
        1 / value_scale,
        kv_positions.stride(0),
        *key.stride(),
        *value.stride(),
        NUM_HEADS=num_heads,
        KEY_DIM=key_dim,
        VALUE_DIM=value_dim,
        CHUNK=chunk,
        IS_FP8=key_cache.dtype == FP8,
    )
