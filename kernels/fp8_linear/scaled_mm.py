"""fp8_linear by torch._scaled_mm: cuBLAS or CUTLASS, whichever torch chooses for scales of rows.

Needs a GPU of compute capability 8.9 or more, bfloat16 results, and sizes of the weight that are multiples of 16. Sums
keep float32's precision: `use_fast_accum` stays off.
"""

from __future__ import annotations

import torch

from kernels.fp8 import Fp8Rows

ALIGNMENT = 16  # bytes


def fp8_linear(x: Fp8Rows, weight: Fp8Rows, bias: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor:
    """See the package."""
    return torch._scaled_mm(
        x.codes,
        weight.codes.T,  # by columns, as both libraries want it
        scale_a=_aligned(x.scales)[:, None],
        scale_b=_aligned(weight.scales)[None, :],
        bias=bias,
        out_dtype=dtype,
    )


def _aligned(scales: torch.Tensor) -> torch.Tensor:
    """The scales where cuBLAS reads them, at a multiple of 16 bytes: those of some rows may begin anywhere."""
    return scales if scales.data_ptr() % ALIGNMENT == 0 else scales.clone()
