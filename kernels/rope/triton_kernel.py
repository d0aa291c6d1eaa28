"""apply_rope on the GPU, with the cache's write of the rotated keys and of the values in the same launch."""

from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit
def _rope_kernel(
    # pointers
    query_ptr,  # [T, Hq, D]
    key_ptr,  # [T, Hkv, D]
    value_ptr,  # [T, Hkv, Dv]; as the caches and slot_mapping read only if HAS_CACHE
    positions_ptr,  # int64 [T]
    cos_ptr,  # [num_positions, HALF], contiguous
    sin_ptr,
    key_cache_ptr,  # contiguous
    value_cache_ptr,
    slot_mapping_ptr,  # int64 [T]
    # strides
    stride_qt,
    stride_qh,
    stride_kt,
    stride_kh,
    stride_vt,
    stride_vh,
    # sizes and options
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    HAS_CACHE: tl.constexpr,
):
    """One head of one token. Grid: (T, NUM_HEADS + NUM_KV_HEADS); query heads first. See the reference."""
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    position = tl.load(positions_ptr + token)
    offs = tl.arange(0, BLOCK_HALF)
    is_half = offs < HALF
    cos = tl.load(cos_ptr + position * HALF + offs, mask=is_half, other=0.0).to(tl.float32)
    sin = tl.load(sin_ptr + position * HALF + offs, mask=is_half, other=0.0).to(tl.float32)
    if head < NUM_HEADS:
        x_ptr = query_ptr + token * stride_qt + head.to(tl.int64) * stride_qh
        a = tl.load(x_ptr + offs, mask=is_half, other=0.0).to(tl.float32)
        b = tl.load(x_ptr + HALF + offs, mask=is_half, other=0.0).to(tl.float32)
        tl.store(x_ptr + offs, (a * cos - b * sin).to(query_ptr.dtype.element_ty), mask=is_half)
        tl.store(x_ptr + HALF + offs, (b * cos + a * sin).to(query_ptr.dtype.element_ty), mask=is_half)
    else:
        kv_head = (head - NUM_HEADS).to(tl.int64)
        x_ptr = key_ptr + token * stride_kt + kv_head * stride_kh
        a = tl.load(x_ptr + offs, mask=is_half, other=0.0).to(tl.float32)
        b = tl.load(x_ptr + HALF + offs, mask=is_half, other=0.0).to(tl.float32)
        rotated_a = (a * cos - b * sin).to(key_ptr.dtype.element_ty)
        rotated_b = (b * cos + a * sin).to(key_ptr.dtype.element_ty)
        tl.store(x_ptr + offs, rotated_a, mask=is_half)
        tl.store(x_ptr + HALF + offs, rotated_b, mask=is_half)
        if HAS_CACHE:
            slot = tl.load(slot_mapping_ptr + token)
            if slot >= 0:
                place = key_cache_ptr + (slot * NUM_KV_HEADS + kv_head) * DIM
                tl.store(place + offs, rotated_a.to(key_cache_ptr.dtype.element_ty), mask=is_half)
                tl.store(place + HALF + offs, rotated_b.to(key_cache_ptr.dtype.element_ty), mask=is_half)
                offs_d = tl.arange(0, BLOCK_D)
                is_rest = (offs_d >= 2 * HALF) & (offs_d < DIM)
                rest = tl.load(x_ptr + offs_d, mask=is_rest)
                tl.store(place + offs_d, rest.to(key_cache_ptr.dtype.element_ty), mask=is_rest)
                offs_dv = tl.arange(0, BLOCK_DV)
                is_value = offs_dv < VALUE_DIM
                values = tl.load(value_ptr + token * stride_vt + kv_head * stride_vh + offs_dv, mask=is_value)
                place = value_cache_ptr + (slot * NUM_KV_HEADS + kv_head) * VALUE_DIM
                tl.store(place + offs_dv, values.to(value_cache_ptr.dtype.element_ty), mask=is_value)


def apply_rope(
    query: torch.Tensor,
    key: torch.Tensor,
    positions: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    store: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor] | None,
) -> None:
    """See the package. The last dimension of every tensor is dense."""
    num_tokens, num_heads, dim = query.shape
    if num_tokens == 0:
        return
    num_kv_heads, half = key.shape[1], cos.shape[1]
    # Without a cache its pointers are read by nobody.
    value, key_cache, value_cache, slot_mapping = store or (key, key, key, positions)
    _rope_kernel[(num_tokens, num_heads + num_kv_heads)](
        query,
        key,
        value,
        positions,
        cos,
        sin,
        key_cache,
        value_cache,
        slot_mapping,
        query.stride(0),
        query.stride(1),
        key.stride(0),
        key.stride(1),
        value.stride(0),
        value.stride(1),
        NUM_HEADS=num_heads,
        NUM_KV_HEADS=num_kv_heads,
        DIM=dim,
        VALUE_DIM=value.shape[2],
        HALF=half,
        BLOCK_HALF=triton.next_power_of_2(half),
        BLOCK_D=triton.next_power_of_2(dim),
        BLOCK_DV=triton.next_power_of_2(value.shape[2]),
        HAS_CACHE=store is not None,
        num_warps=1,
    )
