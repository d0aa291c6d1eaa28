"""The attention of a decoder layer with q, k and v as one product, and norm, rotation and cache write as one kernel."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from data_plane.layers.attention import AttentionSettings, Rotation, attention_of
from data_plane.layers.lora_linear import LoraLinear
from data_plane.layers.rms_norm import RmsNorm
from data_plane.quick_module import QuickModule
from kernels.rope import HeadNorm


class RotaryAttention(QuickModule):
    """Replaces a transformers attention of the common shape. Its cache is attached like that of the replaced one.

    Query and key may be normed: each head by itself (Qwen3, Gemma 3), or whole (OLMo 2).
    """

    def __init__(
        self,
        qkv: LoraLinear,
        o_proj: nn.Module,
        *,
        heads: tuple[int, int, int],
        norms: tuple[RmsNorm, RmsNorm] | None,
        settings: AttentionSettings,
    ) -> None:
        """heads: number of heads of query, key and value."""
        super().__init__()
        self.qkv = qkv
        self.o_proj = o_proj
        self.q_norm: RmsNorm | None = norms[0] if norms else None
        self.k_norm: RmsNorm | None = norms[1] if norms else None
        self.heads = heads
        self.widths = _widths(qkv, heads)
        sizes = {width // count for width, count in zip(self.widths, heads, strict=True)}
        self.head_size = sizes.pop() if len(sizes) == 1 else None  # the one of query, key and value; None: they differ
        self.settings = settings

    def forward(
        self, hidden_states: torch.Tensor, position_embeddings: tuple[torch.Tensor, torch.Tensor], **_: Any
    ) -> tuple[torch.Tensor, None]:
        """[..., hidden] for hidden_states [1, T, hidden] or [T, hidden].

        position_embeddings are cos and sin [1, T, rotary size].

        Both tables hold every value twice, as transformers makes them. Other arguments are the same in all steps and
        were checked when this module was built.
        """
        joint: Any = self.qkv(hidden_states)
        rows = joint if joint.dim() == 2 else joint[0]
        norm = self.head_norm
        if norm is None and self.q_norm is not None and self.k_norm is not None:
            query, key, value = rows.split(self.widths, dim=1)
            normed = (self.q_norm.of_rows(query), self.k_norm.of_rows(key), value)
            query, key, value = (part.unflatten(1, (count, -1)) for part, count in zip(normed, self.heads, strict=True))
        else:
            query, key, value = self._split(rows)
        rotation = Rotation(*self.qkv.context.halves(position_embeddings), norm)
        out = attention_of(self).attend_rotated(query, key, value, rotation, self.settings)
        return self.o_proj(out.reshape(*hidden_states.shape[:-1], -1)), None

    def _split(self, rows: Any) -> Sequence[torch.Tensor]:
        """Query, key and value [T, heads, size] of the joint product [T, n], in its memory."""
        if self.head_size is not None:
            parts: Sequence[Any] = rows.view(-1, sum(self.heads), self.head_size).split_with_sizes(self.heads, dim=1)
            return parts
        parts = rows.split_with_sizes(self.widths, dim=1)
        return [part.unflatten(1, (count, -1)) for part, count in zip(parts, self.heads, strict=True)]

    @property
    def head_norm(self) -> HeadNorm | None:
        """The norm of each head by itself; None without norms, or if query and key are normed whole."""
        if self.q_norm is None or self.k_norm is None or len(self.q_norm.weight) == self.widths[0]:
            return None
        return HeadNorm(self.q_norm.weight, self.k_norm.weight, self.q_norm.eps, self.q_norm.weight_offset)


def _widths(qkv: LoraLinear, heads: tuple[int, int, int]) -> list[int]:
    """Columns of query, key and value in the joint product, whether we joined the linears or the checkpoint has."""
    if len(qkv.out_splits) == 3:
        return qkv.out_splits
    size = qkv.out_features // sum(heads)  # one size for all heads
    return [count * size for count in heads]
