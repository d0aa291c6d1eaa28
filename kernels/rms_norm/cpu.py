"""rms_norm in fewer passes than the definition takes; for every device that torch runs on."""

from __future__ import annotations

import torch


def rms_norm(
    x: torch.Tensor, weight: torch.Tensor, eps: float, residual: torch.Tensor | None, weight_offset: float
) -> torch.Tensor:
    """See the package."""
    if residual is not None:
        x = residual.add_(x)
    values = x.float()
    norm = torch.linalg.vector_norm(values, dim=-1, keepdim=True)
    scale = norm.square_().div_(x.shape[-1]).add_(eps).rsqrt_()
    factor = weight.float() + weight_offset if weight_offset else weight
    return torch.mul(values, scale).mul_(factor).to(x.dtype)
