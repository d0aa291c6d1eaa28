"""rms_norm, the definition."""

from __future__ import annotations

import torch


def rms_norm(
    x: torch.Tensor, weight: torch.Tensor, eps: float, residual: torch.Tensor | None, weight_offset: float
) -> torch.Tensor:
    """y = x / sqrt(mean(x^2) + eps) * (weight + weight_offset) over the last dimension, in fp32, rounded once.

    With a residual: residual += x in place, rounded, and y is of the residual.
    """
    if residual is not None:
        residual.copy_(residual.float() + x.float())
        x = residual
    values = x.float()
    scale = torch.rsqrt(values.square().mean(dim=-1, keepdim=True) + eps)
    return (values * scale * (weight.float() + weight_offset)).to(x.dtype)
