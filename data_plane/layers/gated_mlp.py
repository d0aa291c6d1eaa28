"""The MLP of a decoder layer with gate and up as one product."""

from __future__ import annotations

import torch
from torch import nn

from data_plane.layers.fp8.activations import Fp8Activations
from data_plane.layers.lora_linear import LoraLinear
from data_plane.quick_module import QuickModule
from kernels.gated_activation import gated_activation, gated_activation_fp8


class GatedMlp(QuickModule):
    """down(activation(gate(x)) * up(x)); takes the place of a transformers MLP."""

    def __init__(self, gate_up: LoraLinear, down_proj: nn.Module, activation: str) -> None:
        super().__init__()
        self.gate_up = gate_up
        self.down_proj = down_proj
        self.activation = activation  # of kernels.gated_activation
        self.fp8: Fp8Activations | None = None  # keeps the FP8 form of down_proj's input

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """[..., hidden] for hidden_states [..., hidden]."""
        both, expansion = self.gate_up.product(hidden_states)
        are_rows = both.dim() == 2
        rows = expansion.y if expansion is not None else both if are_rows else both.view(-1, both.shape[-1])
        if self.fp8 is None:
            active = gated_activation(rows, self.activation, expansion)
            output: torch.Tensor = self.down_proj(active if are_rows else active.view(*both.shape[:-1], -1))
            return output
        active, codes = gated_activation_fp8(rows, self.activation, expansion, has_values=self._reads_values())
        active = active if are_rows else active.view(*both.shape[:-1], -1)
        self.fp8.keep(self, active, codes)
        try:
            output = self.down_proj(active)
            return output
        finally:
            self.fp8.forget()

    def _reads_values(self) -> bool:
        """Whether somebody reads down_proj's input as it is, beside its FP8 form: adapters, or who compares both."""
        is_compared = self.fp8 is None or self.fp8.on_read is not None
        return is_compared or not isinstance(self.down_proj, LoraLinear) or self.down_proj.context.lora is not None
