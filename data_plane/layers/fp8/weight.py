"""Weights of linears in FP8."""

from __future__ import annotations

import torch

from data_plane.layers.fp8.activations import Fp8Activations
from kernels.fp8_linear import fp8_linear
from kernels.fp8_rows import quantize_rows


class Fp8Weight:
    """A weight [out, in] with a scale for each output."""

    def __init__(self, weight: torch.Tensor, activations: Fp8Activations) -> None:
        self.rows = quantize_rows(weight)
        self._activations = activations

    def linear(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """torch.nn.functional.linear; x [..., in] of any leading sizes. A scale for each token is found here."""
        y = fp8_linear(self._activations.of(x), self.rows, bias, x.dtype)
        return y.view(*x.shape[:-1], len(self.rows))
