"""What adapters need to know of the base model's weights."""

from __future__ import annotations

from typing import Protocol

import torch


class BaseWeights(Protocol):
    """The base model's linears by target module name. Thread-safe; nobody writes what it gives."""

    def weight(self, target_name: str) -> torch.Tensor:
        """[out, in] in the model's dtype, where the model lies. A copy where the model keeps it in another layout."""
        ...

    def bias(self, target_name: str) -> torch.Tensor | None:
        """[out] in the model's dtype, or None if the linear has none."""
        ...
