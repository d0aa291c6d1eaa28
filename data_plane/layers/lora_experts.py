"""The experts of a mixture with what the step's adapters add to each expert's products.

Takes the place of a transformers module that holds the experts' weights as stacked parameters. Every expert's gate, up
and down is a target module of its own (contract/expert_names.py).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from contract.expert_names import ANY, DOWN, GATE, UP
from data_plane.adapters.step.expert_rows import ExpertRows
from data_plane.layers.context import StepContext
from data_plane.layers.expert_weights import ExpertWeights, PackedWeights, StackedWeights
from data_plane.plan import TargetKind, TargetModule

_STACKED_DIMS = 3  # [experts, out, in], or [experts, in, out]


class LoraExperts(nn.Module):
    """Loaded experts, gated ones, plus what the step's adapters add.

    Each token and each of its experts is one row. Rows are sorted by expert; those of base and of all adapters are
    computed together.
    """

    def __init__(self, experts: nn.Module, name: str, context: StepContext) -> None:
        """Raises ValueError for experts of another shape. That the result is theirs is the caller's to try."""
        super().__init__()
        known: Any = experts
        gate_up, down = getattr(known, "gate_up_proj", None), getattr(known, "down_proj", None)
        if not all(isinstance(weight, nn.Parameter) and weight.dim() == _STACKED_DIMS for weight in (gate_up, down)):
            raise ValueError("it has no stacked gate_up_proj and down_proj")
        if not getattr(known, "has_gate", False) or getattr(known, "has_post_expert_norm", True):
            raise ValueError("its experts are not gated linears alone")
        assert isinstance(gate_up, nn.Parameter) and isinstance(down, nn.Parameter), "both were checked"
        self.experts = known
        self.context = context
        self.num_experts = len(gate_up)
        self.is_transposed = bool(known.is_transposed)
        self.is_interleaved = not known.is_concatenated
        self._gate_up: ExpertWeights = StackedWeights(gate_up, is_transposed=self.is_transposed)
        self._down: ExpertWeights = StackedWeights(down, is_transposed=self.is_transposed)
        hidden, self.width = (down.shape[2], down.shape[1]) if self.is_transposed else (down.shape[1], down.shape[2])
        sides = ((GATE, hidden, self.width), (UP, hidden, self.width), (DOWN, self.width, hidden))
        self.targets = [
            TargetModule(
                f"{name}.{ANY}.{part}",
                TargetKind.EXPERT,
                in_features,
                out_features,
                num_experts=self.num_experts,
                is_interleaved=self.is_interleaved,
            )
            for part, in_features, out_features in sides
        ]
        self._names = tuple(target.name for target in self.targets)

    def forward(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        """[T, hidden] for hidden_states [T, hidden], the experts [T, k] of each token and their weights [T, k].

        In a step with adapters the rows are the step's tokens.
        """
        experts, num_top_k = self.experts, top_k_index.shape[-1]
        expert_ids, order = torch.sort(top_k_index.reshape(-1), stable=True)
        every = torch.arange(self.num_experts, device=expert_ids.device, dtype=expert_ids.dtype)
        ends = torch.searchsorted(expert_ids, every, right=True).to(torch.int32)
        tokens = order // num_top_k
        x = hidden_states[tokens]
        lora = None
        if self.context.lora is not None:
            lora = self.context.lora.expert_rows(self._names, expert_ids, tokens)
        gate_up = self._gate_up.product(x, ends, self._bias("gate_up_proj", expert_ids))
        if lora is not None:
            gate_up = self._add_gate_up(lora, x, gate_up)
        gated = experts._apply_gate(gate_up)
        down = self._down.product(gated, ends, self._bias("down_proj", expert_ids))
        if lora is not None:
            lora.add(self._names[2:], gated, down)
        weighted = down * top_k_weights.reshape(-1)[order].unsqueeze(-1)
        back = torch.empty_like(order)
        back[order] = torch.arange(len(order), device=order.device)
        # A sum over k, not an addition row by row into the tokens: its order is fixed.
        summed = weighted[back].view(len(hidden_states), num_top_k, -1).sum(dim=1)
        return summed.to(hidden_states.dtype)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the weights."""
        weight: torch.Tensor = self.experts.down_proj
        return weight.dtype

    def target_weight(self, target_name: str) -> torch.Tensor:
        """[out, in] of one expert's product, for a target name with the expert's index."""
        path, part = target_name.rsplit(".", 1)
        expert = int(path.rsplit(".", 1)[1])
        weight = (self._down if part == DOWN else self._gate_up).of(expert)
        return weight if part == DOWN else self._rows(weight, int(part == UP))

    def _rows(self, gate_up: torch.Tensor, which: int) -> torch.Tensor:
        """The rows of gate (0) or of up (1)."""
        if self.is_interleaved:
            return gate_up[which::2]
        return gate_up[which * self.width : (which + 1) * self.width]

    def pack_weights(self) -> None:
        """Keep the weights in the layout that is fastest here, which may be the checkpoint's own."""
        for part in ("gate_up_proj", "down_proj"):
            stacked = StackedWeights(getattr(self.experts, part), is_transposed=self.is_transposed)
            packed = PackedWeights.made_of(stacked, self.num_experts)
            if packed is None:
                continue
            if part == "down_proj":
                self._down = packed
            else:
                self._gate_up = packed
            empty = torch.empty_like(getattr(self.experts, part), device="meta")
            setattr(self.experts, part, nn.Parameter(empty, requires_grad=False))

    def _bias(self, part: str, expert_ids: torch.Tensor) -> torch.Tensor | None:
        """[rows, out]: that of each row's expert."""
        if not self.experts.has_bias:
            return None
        bias: torch.Tensor = getattr(self.experts, f"{part}_bias")[expert_ids]
        return bias

    def _add_gate_up(self, lora: ExpertRows, x: torch.Tensor, gate_up: torch.Tensor) -> torch.Tensor:
        """gate_up with what adapters add; adapters have gate and up one after the other."""
        if not self.is_interleaved:
            lora.add(self._names[:2], x, gate_up)
            return gate_up
        if not lora.targets(self._names[:2]):
            return gate_up
        pairs = gate_up.view(len(gate_up), self.width, 2)
        parts = pairs.transpose(1, 2).reshape(len(gate_up), 2 * self.width)
        lora.add(self._names[:2], x, parts)
        return parts.view(len(gate_up), 2, self.width).transpose(1, 2).reshape(len(gate_up), 2 * self.width)
