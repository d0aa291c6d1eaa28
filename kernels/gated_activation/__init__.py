"""The gate of an MLP: activation(gate) * up. `gated_activation` is the only public call."""

from __future__ import annotations

import torch

from kernels.devices import runs_triton
from kernels.gated_activation import cpu, native

__all__ = ["ACTIVATIONS", "gated_activation"]

ACTIVATIONS = ("silu", "gelu", "gelu_tanh")


def gated_activation(x: torch.Tensor, activation: str) -> torch.Tensor:
    """[T, n] for x [T, 2 n], the gate's columns before those of up. gelu is exact, gelu_tanh its approximation."""
    if x.dim() != 2 or x.shape[1] % 2:
        raise ValueError(f"x is {tuple(x.shape)}, want [T, 2 n]")
    if activation not in ACTIVATIONS:
        raise ValueError(f"activation is {activation!r}, want one of {', '.join(ACTIVATIONS)}")
    if runs_triton(x) and x.stride(1) == 1:
        from kernels.gated_activation import triton_kernel

        return triton_kernel.gated_activation(x, activation)
    if native.can_serve(x):
        return native.gated_activation(x, activation)
    return cpu.gated_activation(x, activation)
