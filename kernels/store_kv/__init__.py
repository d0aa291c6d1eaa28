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
    slot_mapping: torch.Tensor,
    key_scale: KVScale = 1.0,
    value_scale: KVScale = 1.0,
) -> None:
    """Write key [T, Hkv, D] and value [T, Hkv, Dv] into the caches, in place.

    Caches are contiguous [num_blocks, block_size, Hkv, D] and [..., Dv] of any float dtype (values are rounded to
    it). slot_mapping is int64 [T]: token t goes to block slot // block_size, offset slot % block_size; a token of
    slot -1 is skipped. The caller gives each slot to one token only. Runs on the device of the tensors.

    An FP8 cache (float8_e4m3fn) holds value / scale, at most 448 in size. The scales are floats, one for a whole cache,
    or float32 tensors [num_blocks, block_size, Hkv], which are written too: each token and head gets the scale at
    which its largest value is 448.
    """
    check_store(key, value, key_cache, value_cache, slot_mapping)
    check_scales(key_cache, value_cache, key_scale, value_scale)
    if runs_triton(key):
        from kernels.store_kv import triton_kernel

        triton_kernel.store_kv(key, value, key_cache, value_cache, slot_mapping, key_scale, value_scale)
    elif native.can_serve(key, value, key_cache, value_cache, slot_mapping):
        native.store_kv(key, value, key_cache, value_cache, slot_mapping, key_scale, value_scale)
    else:
        cpu.store_kv(key, value, key_cache, value_cache, slot_mapping, key_scale, value_scale)


def check_store(
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
) -> None:
    """Refuse what store_kv cannot take, whatever the scales."""
    _check(key, key_cache, slot_mapping, "key")
    _check(value, value_cache, slot_mapping, "value")
    if key_cache.shape[:3] != value_cache.shape[:3]:
        raise ValueError(f"key_cache {tuple(key_cache.shape)} and value_cache {tuple(value_cache.shape)} disagree")


def _check(tokens: torch.Tensor, cache: torch.Tensor, slot_mapping: torch.Tensor, name: str) -> None:
    if tokens.dim() != 3 or cache.dim() != 4 or tokens.shape[1:] != cache.shape[2:]:
        raise ValueError(
            f"{name} {tuple(tokens.shape)} does not fit {name}_cache {tuple(cache.shape)}: "
            "want [T, H, D] and [num_blocks, block_size, H, D]"
        )
    if slot_mapping.dtype != torch.int64 or slot_mapping.shape != tokens.shape[:1]:
        raise ValueError(
            f"slot_mapping is {slot_mapping.dtype} {tuple(slot_mapping.shape)}, want int64 [{tokens.shape[0]}]"
        )
    if not cache.is_contiguous():
        raise ValueError(f"{name}_cache must be contiguous, its strides are {cache.stride()}")
