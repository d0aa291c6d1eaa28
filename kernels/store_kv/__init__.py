"""Writes keys and values of a step's tokens into the paged cache. `store_kv` is the public call."""

from __future__ import annotations

import torch

from kernels.devices import runs_triton
from kernels.fp8 import KVScale, check_scales
from kernels.store_kv import cpu, native

__all__ = ["check_store", "store_kv"]


def store_kv(
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    kv_positions: torch.Tensor,
    key_scale: KVScale = 1.0,
    value_scale: KVScale = 1.0,
) -> None:
    """Write key [T, Hkv, D] and value [T, Hkv, Dv] into the caches, in place.

    Caches are contiguous [num_blocks, block_size, Hkv, D] and [..., Dv] of any float dtype (values are rounded to
    it). kv_positions is int64 [T]: a token at p goes to block p // block_size, offset p % block_size; a token at -1 is
    skipped. The caller gives each position to one token only. Runs on the device of the tensors.

    An FP8 cache (float8_e4m3fn) holds value / scale, at most 448 in size. The scales are floats, one for a whole cache,
    or float32 tensors [num_blocks, block_size, Hkv], which are written too: each token and head gets the scale at
    which its largest value is 448.
    """
    check_store(key, value, key_cache, value_cache, kv_positions)
    check_scales(key_cache, value_cache, key_scale, value_scale)
    if runs_triton(key):
        from kernels.store_kv import triton_kernel

        triton_kernel.store_kv(key, value, key_cache, value_cache, kv_positions, key_scale, value_scale)
    elif native.can_serve(key, value, key_cache, value_cache, kv_positions):
        native.store_kv(key, value, key_cache, value_cache, kv_positions, key_scale, value_scale)
    else:
        cpu.store_kv(key, value, key_cache, value_cache, kv_positions, key_scale, value_scale)


def check_store(
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    kv_positions: torch.Tensor,
) -> None:
    """Refuse what store_kv cannot take, whatever the scales."""
    _check(key, key_cache, kv_positions, "key")
    _check(value, value_cache, kv_positions, "value")
    if key_cache.shape[:3] != value_cache.shape[:3]:
        raise ValueError(f"key_cache {tuple(key_cache.shape)} and value_cache {tuple(value_cache.shape)} disagree")


def _check(tokens: torch.Tensor, cache: torch.Tensor, kv_positions: torch.Tensor, name: str) -> None:
    if tokens.dim() != 3 or cache.dim() != 4 or tokens.shape[1:] != cache.shape[2:]:
        raise ValueError(
            f"{name} {tuple(tokens.shape)} does not fit {name}_cache {tuple(cache.shape)}: "
            "want [T, H, D] and [num_blocks, block_size, H, D]"
        )
    if kv_positions.dtype != torch.int64 or kv_positions.shape != tokens.shape[:1]:
        raise ValueError(
            f"kv_positions is {kv_positions.dtype} {tuple(kv_positions.shape)}, want int64 [{tokens.shape[0]}]"
        )
    if not cache.is_contiguous():
        raise ValueError(f"{name}_cache must be contiguous, its strides are {cache.stride()}")
