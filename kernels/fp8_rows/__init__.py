"""Rows as FP8 numbers with one scale for each row: the inputs and the weights of FP8 products. `quantize_rows` is the
only public call.

Norms and gates write such rows along with their own results (rms_norm_fp8, gated_activation_fp8).
"""

from __future__ import annotations

import torch

from kernels.devices import runs_triton
from kernels.fp8 import Fp8Rows
from kernels.fp8_rows import reference

__all__ = ["quantize_rows"]

MAX_TRITON_WIDTH = 1 << 15  # one program holds a row


def quantize_rows(x: torch.Tensor) -> Fp8Rows:
    """The rows of x [T, n] as FP8 numbers. Values are rounded to even; the largest of a row becomes 448 in size.

    A value that is not finite becomes NaN, or makes its row's scale infinite: a product with that row is not finite.
    """
    if x.dim() != 2:
        raise ValueError(f"x is {tuple(x.shape)}, want [T, n]")
    if runs_triton(x) and x.stride(1) == 1 and x.shape[1] <= MAX_TRITON_WIDTH:
        from kernels.fp8_rows import triton_kernel

        return triton_kernel.quantize_rows(x)
    return reference.quantize_rows(x)
