"""Where adapters may add to the model."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Site:
    """One linear of the model, by its module path in the transformers model."""

    name: str
    in_features: int
    out_features: int
