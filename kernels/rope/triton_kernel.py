"""apply_rope on the GPU, with the norms of the heads before and the write to the cache after, in one launch.

Multiply and add are never fused: each is rounded by itself, as in the definition.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.buckets import ceil_div, round_up
from kernels.rope.reference import HeadNorm
from kernels.triton_launch import Prepared, kernel, no_launch, prepare, prepares

# Of one token, in one program of one warp. The same for every number of tokens: the order of the norm's sums follows
# the program's shape, and a token's result must not depend on what else is in the batch.
BLOCK_HEADS = 4

Store = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]  # value, both caches, kv_positions


@triton.jit
def _turn_heads(
    x_ptr,  # [heads, DIM] of one token, read and written
    weight_ptr,  # [DIM], read only if HAS_NORM
    heads,  # int64 [BLOCK_HEADS, 1]
    is_head,
    cos,  # [1, BLOCK_HALF]
    sin,
    eps,
    weight_offset,
    stride_h,
    DIM: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    BLOCK_REST: tl.constexpr,
    HAS_NORM: tl.constexpr,
):
    """Norm and rotate some heads in place; what was stored: both halves and, where 2 HALF < DIM, the rest."""
    offs = tl.arange(0, BLOCK_HALF)[None, :]
    offs_rest = 2 * HALF + tl.arange(0, BLOCK_REST)[None, :]
    is_half = is_head & (offs < HALF)
    is_rest = is_head & (offs_rest < DIM)
    row_ptr = x_ptr + heads * stride_h
    a = tl.load(row_ptr + offs, mask=is_half, other=0.0).to(tl.float32)
    b = tl.load(row_ptr + HALF + offs, mask=is_half, other=0.0).to(tl.float32)
    rest = a
    if 2 * HALF < DIM:
        rest = tl.load(row_ptr + offs_rest, mask=is_rest, other=0.0).to(tl.float32)
    if HAS_NORM:
        square = tl.sum(a * a + b * b, 1)
        if 2 * HALF < DIM:
            square += tl.sum(rest * rest, 1)
        scale = (1.0 / tl.sqrt(square / DIM + eps))[:, None]
        weight_a = tl.load(weight_ptr + offs, mask=offs < HALF, other=0.0).to(tl.float32) + weight_offset
        weight_b = tl.load(weight_ptr + HALF + offs, mask=offs < HALF, other=0.0).to(tl.float32) + weight_offset
        a = a * scale * weight_a
        b = b * scale * weight_b
        if 2 * HALF < DIM:
            weight_rest = tl.load(weight_ptr + offs_rest, mask=offs_rest < DIM, other=0.0).to(tl.float32)
            rest = rest * scale * (weight_rest + weight_offset)
    turned_a = (a * cos - b * sin).to(x_ptr.dtype.element_ty)
    turned_b = (b * cos + a * sin).to(x_ptr.dtype.element_ty)
    rest = rest.to(x_ptr.dtype.element_ty)
    tl.store(row_ptr + offs, turned_a, mask=is_half)
    tl.store(row_ptr + HALF + offs, turned_b, mask=is_half)
    if 2 * HALF < DIM and HAS_NORM:
        tl.store(row_ptr + offs_rest, rest, mask=is_rest)
    return turned_a, turned_b, rest


@kernel
def rope_kernel(
    # pointers
    query_ptr,  # [T, Hq, D]
    key_ptr,  # [T, Hkv, D]
    value_ptr,  # [T, Hkv, Dv]; as the caches and kv_positions read only if HAS_CACHE
    query_weight_ptr,  # [D]; as key_weight read only if HAS_NORM
    key_weight_ptr,
    positions_ptr,  # int64 [T], read only if HAS_POSITIONS
    cos_ptr,  # [num_positions, HALF]
    sin_ptr,
    key_cache_ptr,  # contiguous
    value_cache_ptr,
    kv_positions_ptr,  # int64 [T]
    # numbers
    eps,
    weight_offset,
    # strides
    stride_qt,
    stride_qh,
    stride_kt,
    stride_kh,
    stride_vt,
    stride_vh,
    stride_cos,
    stride_sin,
    # sizes and options
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
):
    """BLOCK_HEADS heads of one token; the first QUERY_TILES tiles are those of the query, the others of the key.

    Grid: (T, QUERY_TILES + tiles of the key's heads). Sums are float32. See the reference.
    """
    token = tl.program_id(0).to(tl.int64)
    tile = tl.program_id(1)
    row = tl.load(positions_ptr + token) if HAS_POSITIONS else token
    offs = tl.arange(0, BLOCK_HALF)[None, :]
    cos = tl.load(cos_ptr + row * stride_cos + offs, mask=offs < HALF, other=0.0).to(tl.float32)
    sin = tl.load(sin_ptr + row * stride_sin + offs, mask=offs < HALF, other=0.0).to(tl.float32)
    heads = tl.arange(0, BLOCK_HEADS)[:, None].to(tl.int64)
    if tile < QUERY_TILES:
        heads += tile * BLOCK_HEADS
        is_head = heads < NUM_HEADS
        x_ptr = query_ptr + token * stride_qt
        _turn_heads(
            x_ptr, query_weight_ptr, heads, is_head, cos, sin, eps, weight_offset, stride_qh,
            DIM, HALF, BLOCK_HALF, BLOCK_REST, HAS_NORM,
        )  # fmt: skip
    else:
        heads += (tile - QUERY_TILES) * BLOCK_HEADS
        is_head = heads < NUM_KV_HEADS
        x_ptr = key_ptr + token * stride_kt
        turned_a, turned_b, rest = _turn_heads(
            x_ptr, key_weight_ptr, heads, is_head, cos, sin, eps, weight_offset, stride_kh,
            DIM, HALF, BLOCK_HALF, BLOCK_REST, HAS_NORM,
        )  # fmt: skip
        if HAS_CACHE:
            kv_position = tl.load(kv_positions_ptr + token)
            if kv_position >= 0:
                is_half = is_head & (offs < HALF)
                place = key_cache_ptr + (kv_position * NUM_KV_HEADS + heads) * DIM
                tl.store(place + offs, turned_a.to(key_cache_ptr.dtype.element_ty), mask=is_half)
                tl.store(place + HALF + offs, turned_b.to(key_cache_ptr.dtype.element_ty), mask=is_half)
                if 2 * HALF < DIM:
                    offs_rest = 2 * HALF + tl.arange(0, BLOCK_REST)[None, :]
                    is_rest = is_head & (offs_rest < DIM)
                    tl.store(place + offs_rest, rest.to(key_cache_ptr.dtype.element_ty), mask=is_rest)
                offs_dv = tl.arange(0, BLOCK_DV)[None, :]
                is_value = is_head & (offs_dv < VALUE_DIM)
                values = tl.load(value_ptr + token * stride_vt + heads * stride_vh + offs_dv, mask=is_value)
                place = value_cache_ptr + (kv_position * NUM_KV_HEADS + heads) * VALUE_DIM
                tl.store(place + offs_dv, values.to(value_cache_ptr.dtype.element_ty), mask=is_value)


def apply_rope(
    query: torch.Tensor,
    key: torch.Tensor,
    positions: torch.Tensor | None,
    cos: torch.Tensor,
    sin: torch.Tensor,
    norm: HeadNorm | None,
    store: Store | None,
) -> None:
    """See the package. The last dimension of every tensor is dense; store is value, both caches and kv_positions."""
    # A missing tensor is passed as another pointer, which is not read.
    value, key_cache, value_cache, kv_positions = store or (key, key, key, key)
    weights = (query, key) if norm is None else (norm.query_weight, norm.key_weight)
    launch = _prepare(
        query.shape,
        key.shape,
        value.shape,
        (*query.stride()[:2], *key.stride()[:2], *value.stride()[:2], cos.stride(0), sin.stride(0)),
        cos.shape[1],
        None if norm is None else (norm.eps, norm.weight_offset),
        positions is not None,
        store is not None,
    )
    launch(
        query,
        key,
        value,
        *weights,
        key if positions is None else positions,
        cos,
        sin,
        key_cache,
        value_cache,
        kv_positions,
    )


_STRIDES = ("stride_qt", "stride_qh", "stride_kt", "stride_kh", "stride_vt", "stride_vh", "stride_cos", "stride_sin")


@prepares
def _prepare(
    query: torch.Size,
    key: torch.Size,
    value: torch.Size,
    strides: tuple[int, ...],
    half: int,
    norm: tuple[float, float] | None,
    has_positions: bool,
    has_cache: bool,
) -> Prepared:
    """`norm`: its eps and the offset of its weights."""
    (num_tokens, num_heads, dim), num_kv_heads = query, key[1]
    if num_tokens == 0:
        return no_launch
    query_tiles = ceil_div(num_heads, BLOCK_HEADS)
    eps, weight_offset = norm or (0.0, 0.0)
    numbers = {
        "eps": eps,
        "weight_offset": weight_offset,
        **dict(zip(_STRIDES, strides, strict=True)),
        "NUM_HEADS": num_heads,
        "NUM_KV_HEADS": num_kv_heads,
        "DIM": dim,
        "VALUE_DIM": value[2],
        "HALF": half,
        "BLOCK_HEADS": BLOCK_HEADS,
        "BLOCK_HALF": round_up(half),
        "BLOCK_REST": round_up(max(dim - 2 * half, 1)),
        "BLOCK_DV": round_up(value[2]),
        "QUERY_TILES": query_tiles,
        "HAS_NORM": norm is not None,
        "HAS_POSITIONS": has_positions,
        "HAS_CACHE": has_cache,
        "num_warps": 1,
        "enable_fp_fusion": False,
    }
    return prepare(rope_kernel, (num_tokens, query_tiles + ceil_div(num_kv_heads, BLOCK_HEADS)), numbers)
