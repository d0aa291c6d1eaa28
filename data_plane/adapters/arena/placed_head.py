"""The score head of an adapter in the arena: float32 values in the adapter's pages, behind its vectors."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from contract.packed_layout import ScoreHeadSize
from data_plane.adapters.arena.pages import PagePool


@dataclass(frozen=True, slots=True)
class PlacedHead:
    """Where the values of a score head lie."""

    size: ScoreHeadSize
    first_value: int  # index within the adapter's vectors

    def logits(self, pool: PagePool, vector_pages: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
        """float32 [num_labels] of a hidden state, float32 [in_features]. `vector_pages` int32: the adapter's vectors.

        Each state is multiplied by itself, so its logits do not depend on the rows beside it.
        """
        size, width = self.size, pool.values_per_page
        first_page, end = self.first_value // width, self.first_value + size.num_values
        pages = pool.values.index_select(0, vector_pages[first_page : -(-end // width)]).view(-1)
        values = pages[self.first_value - first_page * width :][: size.num_values]
        num_weights = size.num_labels * size.in_features
        logits = torch.mv(values[:num_weights].view(size.num_labels, size.in_features), state)
        return logits + values[num_weights:] if size.has_bias else logits
