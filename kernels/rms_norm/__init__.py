"""RMS norm (Zhang and Sennrich, 2019), with the residual's sum if wanted: `rms_norm`, and `rms_norm_fp8`, which also
writes the result as FP8 rows.
"""

from __future__ import annotations

import torch

from kernels.devices import runs_triton
from kernels.fp8 import Fp8Rows
from kernels.fp8_rows import quantize_rows
from kernels.rms_norm import cpu, native

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
    _check(x, weight, residual)
    if _is_one_launch(x, weight, residual):
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
    _check(x, weight, residual)
    if _is_one_launch(x, weight, residual):
        from kernels.rms_norm.triton_kernel import rms_norm_fp8 as launch

        return launch(x, weight, eps, residual, weight_offset)
    y = rms_norm(x, weight, eps, residual=residual, weight_offset=weight_offset)
    return y, quantize_rows(y)


def _check(x: torch.Tensor, weight: torch.Tensor, residual: torch.Tensor | None) -> None:
    """Raise ValueError for arguments that do not fit each other."""
    if x.dim() != 2 or weight.shape != x.shape[1:] or x.shape[1] == 0:
        raise ValueError(f"x is {tuple(x.shape)} and weight {tuple(weight.shape)}, want [T, H] and [H]")
    if residual is not None and (residual.shape != x.shape or residual.dtype != x.dtype):
        raise ValueError(f"residual is {residual.dtype} {tuple(residual.shape)}, want {x.dtype} {tuple(x.shape)}")


def _is_one_launch(x: torch.Tensor, weight: torch.Tensor, residual: torch.Tensor | None) -> bool:
    """Whether the GPU's kernel serves these."""
    is_dense = x.stride(1) == 1 and weight.stride(0) == 1 and (residual is None or residual.stride(1) == 1)
    return runs_triton(x) and is_dense and x.shape[1] <= MAX_TRITON_HIDDEN
