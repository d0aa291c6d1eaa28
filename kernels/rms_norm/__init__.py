"""RMS norm (Zhang and Sennrich, 2019), with the residual's sum if wanted: `rms_norm`, and `rms_norm_fp8`, which also
writes the result as FP8 rows.
"""

from __future__ import annotations

from functools import lru_cache

import torch

from kernels.devices import runs_triton
from kernels.fp8 import Fp8Rows
from kernels.fp8_rows import quantize_rows
from kernels.rms_norm import cpu, native
from kernels.tensor_spec import TensorSpec, spec_of

__all__ = ["rms_norm", "rms_norm_fp8"]

MAX_TRITON_HIDDEN = 1 << 15  # one program holds a row


def rms_norm(
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    *,
    residual: torch.Tensor | None = None,
    weight_offset: float = 0.0,
) -> torch.Tensor:
    """[T, H] for x [T, H] and weight [H], in x's dtype; weight_offset is 1 for Gemma.

    A residual [T, H] of x's dtype takes the sum residual + x in place, and the result is the norm of that sum.
    """
    is_dense = _check(spec_of(x), spec_of(weight), None if residual is None else spec_of(residual))
    if is_dense and runs_triton(x):
        from kernels.rms_norm.triton_kernel import rms_norm as launch

        return launch(x, weight, eps, residual, weight_offset)
    if native.can_serve(x, weight, residual):
        return native.rms_norm(x, weight, eps, residual, weight_offset)
    return cpu.rms_norm(x, weight, eps, residual, weight_offset)


def rms_norm_fp8(
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    *,
    residual: torch.Tensor | None = None,
    weight_offset: float = 0.0,
) -> tuple[torch.Tensor, Fp8Rows]:
    """rms_norm, and quantize_rows of its result."""
    is_dense = _check(spec_of(x), spec_of(weight), None if residual is None else spec_of(residual))
    if is_dense and runs_triton(x):
        from kernels.rms_norm.triton_kernel import rms_norm_fp8 as launch

        return launch(x, weight, eps, residual, weight_offset)
    y = rms_norm(x, weight, eps, residual=residual, weight_offset=weight_offset)
    return y, quantize_rows(y)


@lru_cache(maxsize=1024)
def _check(x: TensorSpec, weight: TensorSpec, residual: TensorSpec | None) -> bool:
    """Whether the GPU's kernel may serve these. Raises ValueError for arguments that do not fit each other."""
    if len(x.shape) != 2 or weight.shape != x.shape[1:] or x.shape[1] == 0:
        raise ValueError(f"x is {tuple(x.shape)} and weight {tuple(weight.shape)}, want [T, H] and [H]")
    if residual is not None and (residual.shape != x.shape or residual.dtype != x.dtype):
        raise ValueError(f"residual is {residual.dtype} {tuple(residual.shape)}, want {x.dtype} {tuple(x.shape)}")
    is_dense = x.strides[1] == 1 and weight.strides[0] == 1 and (residual is None or residual.strides[1] == 1)
    return is_dense and x.shape[1] <= MAX_TRITON_HIDDEN
