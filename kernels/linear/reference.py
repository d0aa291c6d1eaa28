"""linear in plain torch: the definition."""

from __future__ import annotations

import torch


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """x [T, in] @ weight [out, in].T + bias [out] in fp32, rounded once."""
    output = x.float() @ weight.float().T
    if bias is not None:
        output += bias.float()
    return output.to(x.dtype)
