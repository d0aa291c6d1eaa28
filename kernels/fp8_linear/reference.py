"""fp8_linear in plain torch: the definition."""

from __future__ import annotations

import torch

from kernels.fp8 import Fp8Rows


def fp8_linear(x: Fp8Rows, weight: Fp8Rows, bias: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor:
    """(codes of x @ codes of weight.T) * scales of x * scales of weight + bias in fp32, rounded once."""
    output = torch.mm(x.codes.float(), weight.codes.float().T)
    output = output * x.scales[:, None] * weight.scales
    if bias is not None:
        output += bias.float()
    return output.to(dtype)
