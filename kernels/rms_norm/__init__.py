"""RMS norm (Zhang and Sennrich, 2019), with the residual's sum if wanted. `rms_norm` is the only public call."""

from __future__ import annotations

import torch

from kernels.devices import runs_triton
from kernels.rms_norm import cpu, native

__all__ = ["rms_norm"]

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
    if x.dim() != 2 or weight.shape != x.shape[1:] or x.shape[1] == 0:
        raise ValueError(f"x is {tuple(x.shape)} and weight {tuple(weight.shape)}, want [T, H] and [H]")
    if residual is not None and (residual.shape != x.shape or residual.dtype != x.dtype):
        raise ValueError(f"residual is {residual.dtype} {tuple(residual.shape)}, want {x.dtype} {tuple(x.shape)}")
    tensors = [x, weight] if residual is None else [x, weight, residual]
    is_dense = all(tensor.stride(-1) == 1 for tensor in tensors)
    if runs_triton(x) and is_dense and x.shape[1] <= MAX_TRITON_HIDDEN:
        from kernels.rms_norm import triton_kernel

        return triton_kernel.rms_norm(x, weight, eps, residual, weight_offset)
    if native.can_serve(x, weight, residual):
        return native.rms_norm(x, weight, eps, residual, weight_offset)
    return cpu.rms_norm(x, weight, eps, residual, weight_offset)
