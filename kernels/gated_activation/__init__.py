"""The gate of an MLP: activation(gate) * up. `gated_activation`, and `gated_activation_fp8`, which also writes the
result as FP8 rows.
"""

from __future__ import annotations

import torch

from kernels.devices import runs_triton
from kernels.fp8 import Fp8Rows
from kernels.fp8_rows import quantize_rows
from kernels.gated_activation import cpu, native
from kernels.lora.expansion import Expansion

__all__ = ["ACTIVATIONS", "gated_activation", "gated_activation_fp8"]

MAX_FP8_WIDTH = 1 << 14  # one program holds both halves of a row
ACTIVATIONS = ("silu", "gelu", "gelu_tanh")


def gated_activation(x: torch.Tensor, activation: str, expansion: Expansion | None = None) -> torch.Tensor:
    """[T, n] for x [T, 2 n], the gate's columns before those of up. gelu is exact, gelu_tanh its approximation.

    With an expansion, whose y is x, of what x is once it is added. What x holds afterwards means nothing then.
    """
    if (folded := _folded(x, activation, expansion)) is not None:
        return folded
    if runs_triton(x) and x.stride(1) == 1:
        from kernels.gated_activation.triton_kernel import gated_activation as launch

        return launch(x, activation)
    if native.can_serve(x):
        return native.gated_activation(x, activation)
    return cpu.gated_activation(x, activation)


def gated_activation_fp8(
    x: torch.Tensor, activation: str, expansion: Expansion | None = None, *, has_values: bool = True
) -> tuple[torch.Tensor, Fp8Rows]:
    """gated_activation, and quantize_rows of its result. Without has_values only these rows mean anything."""
    if (folded := _folded(x, activation, expansion)) is not None:
        return folded, quantize_rows(folded)
    if runs_triton(x) and x.stride(1) == 1 and x.shape[1] // 2 <= MAX_FP8_WIDTH:
        from kernels.gated_activation.triton_kernel import gated_activation_fp8 as launch

        return launch(x, activation, has_values=has_values)
    y = gated_activation(x, activation)
    return y, quantize_rows(y)


def _folded(x: torch.Tensor, activation: str, expansion: Expansion | None) -> torch.Tensor | None:
    """The result of the launch that adds the expansion, too. None: x has it already, or there is none.

    Raises ValueError for arguments that do not fit each other.
    """
    if x.dim() != 2 or x.shape[1] % 2:
        raise ValueError(f"x is {tuple(x.shape)}, want [T, 2 n]")
    if activation not in ACTIVATIONS:
        raise ValueError(f"activation is {activation!r}, want one of {', '.join(ACTIVATIONS)}")
    if expansion is None:
        return None
    if expansion.y is not x:
        raise ValueError("the expansion is of another tensor than x")
    if runs_triton(x):
        from kernels.gated_activation.triton_folded import gated_activation as launch

        if (folded := launch(expansion, activation)) is not None:
            return folded
    expansion.add()
    return None
