"""The common decoder layer with its residual sums in the norms' passes."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from data_plane.layers.rms_norm import RmsNorm
from data_plane.quick_module import QuickModule


class DecoderLayer(QuickModule):
    """h += attention(norm(h)); h += mlp(norm(h)); takes the place of a transformers layer of that shape.

    h is changed in place and passed on. The norm that follows, the next layer's or the model's last, is computed in the
    same pass as the sum. A norm that receives another tensor than h computes it anew.
    """

    def __init__(
        self,
        self_attn: nn.Module,
        mlp: nn.Module,
        input_layernorm: RmsNorm,
        post_attention_layernorm: RmsNorm,
    ) -> None:
        super().__init__()
        self.self_attn = self_attn
        self.mlp = mlp
        self.input_layernorm = input_layernorm
        self.post_attention_layernorm = post_attention_layernorm
        self._next: list[RmsNorm] = []  # one at most; a list, since it is a part of another module

    def precede(self, norm: RmsNorm) -> None:
        """Compute this norm, which follows the layer, along with the last sum."""
        self._next = [norm]

    @property
    def following(self) -> RmsNorm | None:
        """The norm that is computed along with the last sum."""
        return self._next[0] if self._next else None

    def forward(self, hidden_states: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        """hidden_states [1, T, hidden] itself, changed; kwargs are for the attention."""
        rows = hidden_states.view(-1, hidden_states.shape[-1])
        normed = self.input_layernorm.of_stream(hidden_states)
        attended: torch.Tensor
        attended, _ = self.self_attn(hidden_states=_as_taken(self.self_attn, normed), **kwargs)
        normed = self.post_attention_layernorm.add_to(rows, attended)
        output: torch.Tensor = self.mlp(_as_taken(self.mlp, normed))
        for norm in self._next:
            norm.prepare(hidden_states, rows, output)
            return hidden_states
        return hidden_states.add_(output)


def _as_taken(module: nn.Module, rows: torch.Tensor) -> torch.Tensor:
    """Rows [T, n] as the module takes them: those of transformers, such as a mixture of experts, have a batch size."""
    return rows if isinstance(module, QuickModule) else rows.unsqueeze(0)
