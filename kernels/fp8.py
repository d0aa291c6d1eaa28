"""FP8 numbers (torch.float8_e4m3fn): the format's limits, rows with scales, and the scales of KV caches.

A stored number times its scale is the value. A cache's scale is a float, one for the whole cache, or a float32 tensor
[num_blocks, block_size, Hkv] beside the blocks, one for each token and head, which store_kv writes. Other caches have
the scale 1. Both attention and store_kv check scales here.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache

import torch

from kernels.tensor_spec import TensorSpec, spec_of

FP8 = torch.float8_e4m3fn
FP8_MAX = 448.0
# The least scale of a token's head: its inverse is finite, and a head of zeros needs no case of its own.
MIN_SCALE = 2.0**-64
NEEDED_CAPABILITY = (8, 9)  # of an NVIDIA GPU, for the conversions that Triton compiles

KVScale = float | torch.Tensor


@dataclass(frozen=True, slots=True)
class Fp8Rows:
    """Rows as FP8 numbers: the values are codes * scales[:, None]."""

    codes: torch.Tensor  # FP8 [T, n], contiguous
    scales: torch.Tensor  # float32 [T]

    def __len__(self) -> int:
        return len(self.codes)

    def __getitem__(self, rows: slice) -> Fp8Rows:
        """Some of the rows, in the same memory."""
        return Fp8Rows(self.codes[rows], self.scales[rows])

    @property
    def shape(self) -> torch.Size:
        """[T, n]"""
        return self.codes.shape

    @property
    def device(self) -> torch.device:
        return self.codes.device

    def float(self) -> torch.Tensor:
        """The values, float32 [T, n]."""
        return self.codes.float() * self.scales[:, None]


def scale_spec(scale: KVScale) -> float | TensorSpec:
    """A scale as plain data."""
    return spec_of(scale) if isinstance(scale, torch.Tensor) else scale


def check_scales(
    key_cache: TensorSpec, value_cache: TensorSpec, key_scale: float | TensorSpec, value_scale: float | TensorSpec
) -> None:
    """Refuse scales that do not belong to these caches, and FP8 caches on a device that cannot read them."""
    if key_cache.dtype != value_cache.dtype and FP8 in (key_cache.dtype, value_cache.dtype):
        raise ValueError(f"the caches are {key_cache.dtype} and {value_cache.dtype}, want both {FP8} or neither")
    if isinstance(key_scale, TensorSpec) != isinstance(value_scale, TensorSpec):
        raise ValueError("key_scale and value_scale are of two kinds, want two floats or two tensors")
    _check_scale(key_cache, key_scale, "key")
    _check_scale(value_cache, value_scale, "value")
    refusal = fp8_refusal(key_cache.device) if key_cache.dtype == FP8 else None
    if refusal is not None:
        raise ValueError(refusal)


def fp8_refusal(device: torch.device, what: str = "FP8 KV caches") -> str | None:
    """Why the GPU cannot serve what is in FP8, or None if it can, or is not an NVIDIA GPU."""
    capability = _capability(device.index) if device.type == "cuda" and torch.version.cuda else NEEDED_CAPABILITY
    if capability >= NEEDED_CAPABILITY:
        return None
    have, want = (".".join(map(str, version)) for version in (capability, NEEDED_CAPABILITY))
    return f"{torch.cuda.get_device_name(device)} has compute capability {have}, {what} need at least {want}"


def widen(codes: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The values of FP8 numbers, exactly.

    By a table, two numbers at once where they lie in pairs: on a CPU torch's own cast goes one by one, 12 times slower.
    """
    flat = codes.flatten()
    if flat.numel() % 2 == 0 and flat.storage_offset() % 2 == 0:
        pairs = _pairs(dtype, codes.device).index_select(0, flat.view(torch.uint16).int())
        return pairs.view(dtype).view(codes.shape)
    return _values(dtype, codes.device).index_select(0, flat.view(torch.uint8).int()).view(codes.shape)


def _check_scale(cache: TensorSpec, scale: float | TensorSpec, name: str) -> None:
    if cache.dtype != FP8:
        if isinstance(scale, TensorSpec) or scale != 1.0:
            raise ValueError(f"{name}_scale is given for a cache of {cache.dtype}; only {FP8} caches have scales")
    elif not isinstance(scale, TensorSpec):
        if not (math.isfinite(scale) and scale > 0):
            raise ValueError(f"{name}_scale is {scale}, want a positive number")
    elif scale.dtype != torch.float32 or scale.shape != cache.shape[:3] or not scale.is_contiguous():
        raise ValueError(
            f"{name}_scale is {scale.dtype} {tuple(scale.shape)} with strides {scale.strides}, "
            f"want contiguous float32 {list(cache.shape[:3])}"
        )
    elif scale.device != cache.device:
        raise ValueError(f"{name}_scale is on {scale.device}, its cache on {cache.device}")


@cache
def _values(dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """[256]: what each code stands for."""
    return torch.arange(256, dtype=torch.uint8).view(FP8).to(dtype).to(device)


@cache
def _pairs(dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """[65536]: what two codes side by side stand for, as one number of twice the dtype's size."""
    codes = torch.arange(1 << 16, dtype=torch.int32).to(torch.uint16).view(torch.uint8).long()
    values = _values(dtype, device).index_select(0, codes.to(device))
    return values.view(torch.int64 if dtype == torch.float32 else torch.int32)


@cache
def _capability(index: int | None) -> tuple[int, int]:
    return torch.cuda.get_device_capability(index)
