"""RMS norm (Zhang and Sennrich, 2019), with the residual's sum if wanted. `rms_norm` is the only public call."""

from __future__ import annotations

import torch

from kernels.devices import runs_triton
from kernels.lora.expansion import Expansion
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
    expansion: Expansion | None = None,
) -> torch.Tensor:
    """[T, H] for x [T, H] and weight [H], in x's dtype; weight_offset is 1 for Gemma.

    A residual [T, H] of x's dtype takes the sum residual + x in place, and the result is the norm of that sum. With an
    expansion, whose y is x, it is added to x first.
    """
    if x.dim() != 2 or weight.shape != x.shape[1:] or x.shape[1] == 0:
        raise ValueError(f"x is {tuple(x.shape)} and weight {tuple(weight.shape)}, want [T, H] and [H]")
    if residual is not None and (residual.shape != x.shape or residual.dtype != x.dtype):
        raise ValueError(f"residual is {residual.dtype} {tuple(residual.shape)}, want {x.dtype} {tuple(x.shape)}")
    tensors = [x, weight] if residual is None else [x, weight, residual]
    is_dense = all(tensor.stride(-1) == 1 for tensor in tensors)
    is_one_launch = runs_triton(x) and is_dense and x.shape[1] <= MAX_TRITON_HIDDEN
    if expansion is not None:
        if expansion.y is not x:
            raise ValueError("the expansion is of another tensor than x")
        if is_one_launch and residual is not None:
            from kernels.rms_norm import triton_folded

            if (columns := triton_folded.tile_columns(expansion)) is not None:
                return triton_folded.rms_norm(expansion, weight, eps, residual, weight_offset, columns)
        expansion.add()
    if is_one_launch:
        from kernels.rms_norm import triton_kernel

        return triton_kernel.rms_norm(x, weight, eps, residual, weight_offset)
    if native.can_serve(x, weight, residual):
        return native.rms_norm(x, weight, eps, residual, weight_offset)
    return cpu.rms_norm(x, weight, eps, residual, weight_offset)
