"""The gate of an MLP: activation(gate) * up. `gated_activation` is the only public call."""

from __future__ import annotations

import torch

from kernels.devices import runs_triton
from kernels.gated_activation import cpu, native
from kernels.lora.expansion import Expansion

__all__ = ["ACTIVATIONS", "gated_activation"]

ACTIVATIONS = ("silu", "gelu", "gelu_tanh")


def gated_activation(x: torch.Tensor, activation: str, expansion: Expansion | None = None) -> torch.Tensor:
    """[T, n] for x [T, 2 n], the gate's columns before those of up. gelu is exact, gelu_tanh its approximation.

    With an expansion, whose y is x, of what x is once it is added. What x holds afterwards means nothing then.
    """
    if x.dim() != 2 or x.shape[1] % 2:
        raise ValueError(f"x is {tuple(x.shape)}, want [T, 2 n]")
    if activation not in ACTIVATIONS:
        raise ValueError(f"activation is {activation!r}, want one of {', '.join(ACTIVATIONS)}")
    if expansion is not None:
        if expansion.y is not x:
            raise ValueError("the expansion is of another tensor than x")
        if runs_triton(x):
            from kernels.gated_activation import triton_folded

            if (columns := triton_folded.tile_columns(expansion)) is not None:
                return triton_folded.gated_activation(expansion, activation, columns)
        expansion.add()
    if runs_triton(x) and x.stride(1) == 1:
        from kernels.gated_activation import triton_kernel

        return triton_kernel.gated_activation(x, activation)
    if native.can_serve(x):
        return native.gated_activation(x, activation)
    return cpu.gated_activation(x, activation)
