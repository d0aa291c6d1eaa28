"""What the layers of one model know about the step in hand. The engine writes it, attention and linears read it.

One object per model, made at load and never replaced: every layer holds a reference to it.
"""

from __future__ import annotations

from typing import Protocol

import torch

from kernels.lora.native import LoraTokens
from kernels.paged_attention import AttentionBatch


class LoraStep(Protocol):
    """Adapters of one step; data_plane.adapters builds it."""

    def apply(self, site_name: str, x: torch.Tensor, y: torch.Tensor) -> None:
        """Add the adapters' part of the site to y [num_tokens, out], in place, for x [num_tokens, in]."""

    def apply_group(self, site_names: tuple[str, ...], x: torch.Tensor, y: torch.Tensor) -> None:
        """`apply` for sites that read the same x and write side by side in y [num_tokens, sum of out], in order."""

    def embed(self, site_name: str, token_ids: torch.Tensor, y: torch.Tensor, multiplier: float) -> None:
        """`apply` for an embedding and token_ids [num_tokens]; what is added is multiplied."""

    def native_tokens(self, num_sites: int) -> LoraTokens:
        """Which token has which adapter, for native ops over groups of up to num_sites sites."""


class StepContext:
    """The step in hand; between steps everything is None."""

    def __init__(self) -> None:
        self.attention: AttentionBatch | None = None
        self.slot_mapping: torch.Tensor | None = None  # int64 [num_tokens]: where each token's KV goes
        self.lora: LoraStep | None = None  # None: no token of the step has an adapter
        self.head_lora: LoraStep | None = None  # of the rows that the head sees; None: none that targets the head

    def begin(
        self,
        attention: AttentionBatch,
        slot_mapping: torch.Tensor,
        lora: LoraStep | None,
        head_lora: LoraStep | None = None,
    ) -> None:
        """Set the step for the forward pass that follows."""
        self.attention = attention
        self.slot_mapping = slot_mapping
        self.lora = lora
        self.head_lora = head_lora

    def end(self) -> None:
        """Forget the step."""
        self.attention = None
        self.slot_mapping = None
        self.lora = None
        self.head_lora = None
