"""Rotary position embedding, alone or with the write of keys and values to the cache.

`apply_rope` and `apply_rope_and_store_kv` are the public calls; the second is the first, then store_kv, in one launch
on a GPU.
"""

from __future__ import annotations

import torch

from kernels.devices import runs_triton
from kernels.rope import reference
from kernels.store_kv import check_store, store_kv

__all__ = ["apply_rope", "apply_rope_and_store_kv"]


def apply_rope(
    query: torch.Tensor, key: torch.Tensor, positions: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
) -> None:
    """Rotate query [T, Hq, D] and key [T, Hkv, D] in place.

    positions is int64 [T], each below num_positions; cos and sin are [num_positions, n], 2 n <= D. The two values of a
    pair lie n apart; what is behind 2 n stays.
    """
    _check(query, key, positions, cos, sin)
    if _runs_triton(query, key, positions, cos, sin):
        from kernels.rope import triton_kernel

        triton_kernel.apply_rope(query, key, positions, cos, sin, None)
    else:
        reference.apply_rope(query, key, positions, cos, sin)


def apply_rope_and_store_kv(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    positions: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
) -> None:
    """Rotate as apply_rope does, then write key and value to their slots as store_kv does."""
    _check(query, key, positions, cos, sin)
    check_store(key, value, key_cache, value_cache, slot_mapping)
    if _runs_triton(query, key, positions, cos, sin) and value.stride(2) == 1 and slot_mapping.is_contiguous():
        from kernels.rope import triton_kernel

        store = (value, key_cache, value_cache, slot_mapping)
        triton_kernel.apply_rope(query, key, positions, cos, sin, store)
    else:
        reference.apply_rope(query, key, positions, cos, sin)
        store_kv(key, value, key_cache, value_cache, slot_mapping)


def _runs_triton(
    query: torch.Tensor, key: torch.Tensor, positions: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
) -> bool:
    is_dense = query.stride(2) == 1 and key.stride(2) == 1
    return runs_triton(query) and is_dense and all(tensor.is_contiguous() for tensor in (positions, cos, sin))


def _check(
    query: torch.Tensor, key: torch.Tensor, positions: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
) -> None:
    if query.dim() != 3 or key.dim() != 3 or query.shape[::2] != key.shape[::2] or query.dtype != key.dtype:
        raise ValueError(
            f"query is {query.dtype} {tuple(query.shape)} and key {key.dtype} {tuple(key.shape)}, "
            "want [T, Hq, D] and [T, Hkv, D] of one dtype"
        )
    if positions.dtype != torch.int64 or positions.shape != query.shape[:1]:
        raise ValueError(f"positions is {positions.dtype} {tuple(positions.shape)}, want int64 [{query.shape[0]}]")
    if cos.dim() != 2 or cos.shape != sin.shape or not 0 < 2 * cos.shape[1] <= query.shape[2]:
        raise ValueError(
            f"cos is {tuple(cos.shape)} and sin {tuple(sin.shape)}, "
            f"want [positions, n] with 2 n at most {query.shape[2]}"
        )
