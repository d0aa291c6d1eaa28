"""Writes keys and values of a step's tokens into the paged cache. `store_kv` is the public call."""

from __future__ import annotations

from functools import lru_cache

import torch

from kernels.devices import runs_triton
from kernels.fp8 import KVScale, check_scales, scale_spec
from kernels.store_kv import cpu, native
from kernels.tensor_spec import TensorSpec, spec_of

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
    caches = (spec_of(key_cache), spec_of(value_cache))
    check_store(spec_of(key), spec_of(value), *caches, spec_of(kv_positions))
    check_scales(*caches, scale_spec(key_scale), scale_spec(value_scale))
    if runs_triton(key):
        from kernels.store_kv import triton_kernel

        triton_kernel.store_kv(key, value, key_cache, value_cache, kv_positions, key_scale, value_scale)
    elif native.can_serve(key, value, key_cache, value_cache, kv_positions):
        native.store_kv(key, value, key_cache, value_cache, kv_positions, key_scale, value_scale)
    else:
        cpu.store_kv(key, value, key_cache, value_cache, kv_positions, key_scale, value_scale)


@lru_cache(maxsize=1024)
def check_store(
    key: TensorSpec, value: TensorSpec, key_cache: TensorSpec, value_cache: TensorSpec, kv_positions: TensorSpec
) -> None:
    """Refuse what store_kv cannot take, whatever the scales."""
    _check(key.shape, key_cache, kv_positions, "key")
    _check(value.shape, value_cache, kv_positions, "value")
    keys, values = key_cache.shape, value_cache.shape
    if keys[:3] != values[:3]:
        raise ValueError(f"key_cache {tuple(keys)} and value_cache {tuple(values)} disagree")


def _check(tokens: torch.Size, cache: TensorSpec, kv_positions: TensorSpec, name: str) -> None:
    shape = cache.shape
    if len(tokens) != 3 or len(shape) != 4 or tokens[1:] != shape[2:]:
        raise ValueError(
            f"{name} {tuple(tokens)} does not fit {name}_cache {tuple(shape)}: "
            "want [T, H, D] and [num_blocks, block_size, H, D]"
        )
    if kv_positions.dtype != torch.int64 or kv_positions.shape != tokens[:1]:
        raise ValueError(f"kv_positions is {kv_positions.dtype} {tuple(kv_positions.shape)}, want int64 [{tokens[0]}]")
    if not cache.is_contiguous():
        raise ValueError(f"{name}_cache must be contiguous, its strides are {cache.strides}")
