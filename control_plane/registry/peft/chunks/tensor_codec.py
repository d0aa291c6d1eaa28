"""Float conversion on raw little-endian bytes with numpy, which has no bfloat16 of its own."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

Float32Array = npt.NDArray[np.float32]
StoredArray = npt.NDArray[Any]  # of a type of STORED; bfloat16 as its bits

STORED = {"F32": "<f4", "F16": "<f2", "BF16": "<u2"}  # numpy's words, by safetensors' words
_SAME = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
_BF16_EXPONENT = 0x7F80  # all of its bits are set in what is not finite


def decode(raw: bytes, dtype: str, shape: tuple[int, ...]) -> Float32Array:
    """safetensors bytes of type "F32", "F16" or "BF16" as float32; exact."""
    return _as_float32(np.frombuffer(raw, dtype=STORED[dtype]), dtype).reshape(shape)


def is_finite(values: StoredArray, dtype: str) -> bool:
    """Whether every value of an array of safetensors' type `dtype` is finite."""
    if dtype == "BF16":
        return bool(((values & _BF16_EXPONENT) != _BF16_EXPONENT).all())
    return bool(np.isfinite(values).all())


def convert(values: StoredArray, source: str, dtype: str) -> StoredArray | None:
    """Finite values of safetensors' type `source` as "float32", "float16" or "bfloat16".

    None if one is too large for the type. Rounds to nearest, ties to even. Values of that type are not copied.
    """
    if _SAME[source] == dtype:
        return values
    wide = np.ascontiguousarray(_as_float32(values, source), dtype="<f4")
    if dtype == "float32":
        return wide
    if dtype == "float16":
        with np.errstate(over="ignore"):
            half = wide.astype("<f2")
        return half if np.isfinite(half).all() else None
    bits = wide.view(np.uint32)
    # Adding just under half of the dropped part, and one more if the kept part is odd, carries as rounding must.
    rounded = bits >> 16
    rounded &= 1
    rounded += bits
    rounded += 0x7FFF
    rounded >>= 16
    kept = rounded.astype("<u2")
    return kept if is_finite(kept, "BF16") else None


def encode(values: Float32Array, dtype: str) -> bytes | None:
    """Bytes of finite `values` as "float32", "float16" or "bfloat16", or None if one is too large for the type."""
    converted = convert(values, "F32", dtype)
    return None if converted is None else converted.tobytes()


def _as_float32(values: StoredArray, dtype: str) -> Float32Array:
    if dtype == "F32":
        return values
    if dtype == "F16":
        return values.astype(np.float32)
    return (values.astype(np.uint32) << 16).view(np.float32)
