"""The native store_kv: the structures that store.h and store_kv.c take, and the op run alone."""

from __future__ import annotations

import ctypes

import torch

from kernels.fp8 import FP8, KVScale
from kernels.native import DTYPES, Step, has_native, integers, pointers, run_one

_SERVED = (torch.float32, torch.bfloat16, torch.float16)


class Part(ctypes.Structure):
    """Keys or values; store.h says what the fields are."""

    _fields_ = [  # ctypes wants a list
        *pointers("tokens", "cache", "scales"),
        *integers("stride", "head_stride", "dim"),
        ("inverse_scale", ctypes.c_float),
    ]


class Store(ctypes.Structure):
    """Both, and their caches; store.h says what the fields are."""

    _fields_ = [  # ctypes wants a list
        ("key", Part),
        ("value", Part),
        *integers("num_heads", "num_kv_positions", "dtype", "cache_dtype"),
    ]


class StoreKv(ctypes.Structure):
    """The source's argument; store_kv.c says what the fields are."""

    _fields_ = [("store", Store), *pointers("kv_positions")]


def can_serve(
    key: torch.Tensor, value: torch.Tensor, key_cache: torch.Tensor, value_cache: torch.Tensor, *others: torch.Tensor
) -> bool:
    """Whether native code stores these: of one dtype with dense heads, on the CPU. The others lie there too."""
    is_fit = key.dtype == value.dtype and key.dtype in _SERVED and key.stride(2) == value.stride(2) == 1
    is_kept = key_cache.dtype == value_cache.dtype and key_cache.dtype in (*_SERVED, FP8)
    return is_fit and is_kept and has_native(key, value, key_cache, value_cache, *others)


def store_of(
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    key_scale: KVScale,
    value_scale: KVScale,
) -> Store:
    """The structure of tensors as store_kv takes them."""
    return Store(
        key=_part(key, key_cache, key_scale),
        value=_part(value, value_cache, value_scale),
        num_heads=key.shape[1],
        num_kv_positions=key_cache.shape[0] * key_cache.shape[1],
        dtype=DTYPES[key.dtype],
        cache_dtype=DTYPES[key_cache.dtype],
    )


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
    kv_positions = kv_positions.contiguous()
    check_kv_positions(kv_positions, key_cache)
    store = store_of(key, value, key_cache, value_cache, key_scale, value_scale)
    run_one("store_kv", StoreKv(store, kv_positions.data_ptr()), Step(num_tokens=len(key)))


def check_kv_positions(kv_positions: torch.Tensor, cache: torch.Tensor) -> None:
    """Raise IndexError for KV positions outside the cache. Native code skips them."""
    num_kv_positions = cache.shape[0] * cache.shape[1]
    if len(kv_positions) and int(kv_positions.numpy().max()) >= num_kv_positions:
        raise IndexError(f"kv_positions has {int(kv_positions.max())}, the caches have {num_kv_positions} positions")


def _part(tokens: torch.Tensor, cache: torch.Tensor, scale: KVScale) -> Part:
    has_scales = isinstance(scale, torch.Tensor)
    return Part(
        tokens=tokens.data_ptr(),
        cache=cache.data_ptr(),
        scales=scale.data_ptr() if isinstance(scale, torch.Tensor) else None,
        stride=tokens.stride(0),
        head_stride=tokens.stride(1),
        dim=tokens.shape[2],
        inverse_scale=1.0 if has_scales else 1 / scale,
    )
