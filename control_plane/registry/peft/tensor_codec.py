"""Float conversion on raw little-endian bytes with numpy, which has no bfloat16 of its own."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Float32Array = npt.NDArray[np.float32]


def decode(raw: bytes, dtype: str, shape: tuple[int, ...]) -> Float32Array:
    """safetensors bytes of type "F32", "F16" or "BF16" as float32; exact."""
    if dtype == "F32":
        return np.frombuffer(raw, dtype="<f4").reshape(shape)
    if dtype == "F16":
        return np.frombuffer(raw, dtype="<f2").astype(np.float32).reshape(shape)
    bits = np.frombuffer(raw, dtype="<u2").astype(np.uint32) << 16
    return bits.view(np.float32).reshape(shape)


def encode(values: Float32Array, dtype: str) -> bytes | None:
    """Bytes of finite `values` as "float32", "float16" or "bfloat16", or None if one is too large for the type.

    Rounds to nearest, ties to even.
    """
    if dtype == "float32":
        return values.astype("<f4", copy=False).tobytes()
    if dtype == "float16":
        with np.errstate(over="ignore"):
            half = values.astype("<f2")
        return half.tobytes() if np.isfinite(half).all() else None
    bits = np.ascontiguousarray(values, dtype="<f4").view(np.uint32)
    # Adding just under half of the dropped part, and one more if the kept part is odd, carries as rounding must.
    rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype("<u2")
    return rounded.tobytes() if ((rounded & 0x7F80) != 0x7F80).all() else None
