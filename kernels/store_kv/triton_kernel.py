"""store_kv on the GPU: one launch for keys and values, no wait for the device.

The grid is (tokens, chunks of one token's values): it depends on shapes alone, and a skipped token's programs end at
once.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

MAX_CHUNK = 2048


@triton.jit
def _store_one(
    tokens_ptr,
    cache_ptr,
    token,
    slot,
    stride_token,
    stride_head,
    stride_dim,
    offs,
    NUM_HEADS: tl.constexpr,
    DIM: tl.constexpr,
):
    """Copy the elements offs of one token [NUM_HEADS, DIM] to its slot; offsets past the token are masked."""
    heads = offs // DIM
    dims = offs - heads * DIM
    is_inside = offs < NUM_HEADS * DIM
    source = token.to(tl.int64) * stride_token + heads.to(tl.int64) * stride_head + dims.to(tl.int64) * stride_dim
    values = tl.load(tokens_ptr + source, mask=is_inside)
    # The caches are contiguous: slot * NUM_HEADS * DIM is where block slot // block_size, offset slot % block_size is.
    target = slot * (NUM_HEADS * DIM) + offs
    tl.store(cache_ptr + target, values.to(cache_ptr.dtype.element_ty), mask=is_inside)


@triton.jit
def _store_kv_kernel(
    # pointers
    key_ptr,  # [T, Hkv, D]
    value_ptr,  # [T, Hkv, Dv]
    key_cache_ptr,  # [num_blocks, block_size, Hkv, D], contiguous
    value_cache_ptr,
    slot_mapping_ptr,  # int64 [T]
    # strides, in elements
    stride_slot,
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
):
    """key_cache[slot[t]] = key[t] and value_cache[slot[t]] = value[t] where slot[t] >= 0."""
    token = tl.program_id(0)
    slot = tl.load(slot_mapping_ptr + token.to(tl.int64) * stride_slot)
    if slot >= 0:
        offs = tl.program_id(1) * CHUNK + tl.arange(0, CHUNK)
        _store_one(key_ptr, key_cache_ptr, token, slot, stride_kt, stride_kh, stride_kd, offs, NUM_HEADS, KEY_DIM)
        _store_one(value_ptr, value_cache_ptr, token, slot, stride_vt, stride_vh, stride_vd, offs, NUM_HEADS, VALUE_DIM)


def store_kv(
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
) -> None:
    """See the package."""
    num_tokens, num_heads, key_dim = key.shape
    value_dim = value.shape[2]
    width = num_heads * max(key_dim, value_dim)
    if num_tokens == 0 or width == 0:
        return
    chunk = min(triton.next_power_of_2(width), MAX_CHUNK)
    _store_kv_kernel[(num_tokens, triton.cdiv(width, chunk))](
        key,
        value,
        key_cache,
        value_cache,
        slot_mapping,
        slot_mapping.stride(0),
        *key.stride(),
        *value.stride(),
        NUM_HEADS=num_heads,
        KEY_DIM=key_dim,
        VALUE_DIM=value_dim,
        CHUNK=chunk,
    )
