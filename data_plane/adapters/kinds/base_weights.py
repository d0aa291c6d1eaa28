"""The base model's weights, as the kinds of adapters read them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import torch


class BaseWeights(Protocol):
    """The base model's linears by module name. Thread-safe; callers do not write the tensors."""

    def weight(self, target_name: str) -> torch.Tensor:
        """[out, in] in the model's dtype, where the model lies. A copy where the model keeps it in another layout."""
        ...

    def bias(self, target_name: str) -> torch.Tensor | None:
        """[out] in the model's dtype, or None if the linear has none."""
        ...
