"""Where adapters may add to the model."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class SiteKind(Enum):
    """What a site is. LAYER: any linear that every token of a step passes."""

    LAYER = "layer"
    HEAD = "head"  # sees the rows that logits are wanted of
    EMBEDDING = "embedding"


@dataclass(frozen=True, slots=True)
class Site:
    """One linear of the model, or its embedding, by its module path in the transformers model."""

    name: str
    in_features: int  # of an embedding: the vocabulary
    out_features: int
    kind: SiteKind = SiteKind.LAYER

    @property
    def widths(self) -> list[int]:
        """Its widths but for the vocabulary, which need not be whole pages."""
        sides = {SiteKind.HEAD: [self.in_features], SiteKind.EMBEDDING: [self.out_features]}
        return sides.get(self.kind, [self.in_features, self.out_features])
