"""gated_activation, the definition."""

from __future__ import annotations

import torch
from torch.nn import functional


def gated_activation(x: torch.Tensor, activation: str) -> torch.Tensor:
    """activation(x[:, :n]) * x[:, n:] for x [T, 2 n], in fp32, rounded once."""
    gate, up = x.float().chunk(2, dim=-1)
    if activation == "silu":
        gate = functional.silu(gate)
    else:
        gate = functional.gelu(gate, approximate="tanh" if activation == "gelu_tanh" else "none")
    return (gate * up).to(x.dtype)
