"""The model's rotary embedding, as the arena sees it: long-context adapters compute with tables of their own."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

from contract.rope_scaling import RopeScaling

if TYPE_CHECKING:
    import torch

# cos and sin [1, T, rotary size] of hidden states [1, T, hidden], for their dtype and device, at positions [1, T].
RotaryTables = Callable[["torch.Tensor", "torch.Tensor"], "tuple[torch.Tensor, torch.Tensor]"]


class Rotary(Protocol):
    """Makes tables. Thread-safe."""

    def scaled(self, scaling: RopeScaling) -> RotaryTables:
        """The tables of a setting; the same object for equal settings. Raises ValueError if the model has no such."""
        ...
