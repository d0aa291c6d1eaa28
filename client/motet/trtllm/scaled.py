"""Multiplies B by the scaling, as TensorRT-LLM's rows have it, so that a division gives every bit back.

A power of two changes no bit. Another scaling rounds the product: dividing it again gives the trained value, or a
neighbour of it in float32. The direction is kept as a correction of -1, 0 or 1.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from motet.trtllm.tensors import rounded

if TYPE_CHECKING:
    from motet.trtllm.tensors import Array


def scaled(b: Array, scaling: float, dtype: str) -> Array:
    """B times the scaling, float32 values as `dtype` has them."""
    import numpy as np

    with np.errstate(over="ignore"):
        return rounded((b.astype(np.float64) * scaling).astype(np.float32), dtype)


def unscaled(product: Array, scaling: float, corrections: Array | None = None) -> Array:
    """B again, float32."""
    import numpy as np

    with np.errstate(over="ignore", invalid="ignore"):
        values = (product.astype(np.float64) / scaling).astype(np.float32)
    if corrections is None:
        return values
    towards = np.where(corrections > 0, np.float32(np.inf), np.float32(-np.inf)).astype(np.float32)
    return np.where(corrections == 0, values, np.nextafter(values, towards)).astype(np.float32)


def is_lossless(b: Array, scaling: float, dtype: str) -> bool:
    """Whether the division alone gives B back."""
    import numpy as np

    return bool(np.array_equal(unscaled(scaled(b, scaling, dtype), scaling), b))


def corrections_of(b: Array, scaling: float) -> Array | None:
    """int8, of B's shape: what `unscaled` needs beside the float32 product. None for values too small or large."""
    import numpy as np

    product = scaled(b, scaling, "float32")
    values = unscaled(product, scaling)
    steps = (b > values).astype(np.int8) - (b < values).astype(np.int8)
    return steps if np.array_equal(unscaled(product, scaling, steps), b) else None
