"""How the rows that adapters replace in an embedding or a head lie in the arena's pages.

A slot's rows [count, width] lie as A of a module does (kernels/lora/layout.py), with `count` in the place of the rank.
Their token ids, in rising order, and the biases of a head's rows are values of 4 bytes, side by side over the pages in
the order of page_ids.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class RowTable:
    """The replaced rows of one embedding or head, for all slots. The tensors stay for the life of the arena."""

    pages: torch.Tensor  # [num_pages, 8, W]
    values: torch.Tensor  # float32 [num_pages, values of a page]: the pages' memory
    page_ids: torch.Tensor  # int32, any length
    first: torch.Tensor  # int32 [num_slots]: index into page_ids of the first page
    count: torch.Tensor  # int32 [num_slots]: rows; 0: the slot's adapter replaces none
    ids: torch.Tensor  # int64 [num_slots]: where the int32 token ids begin, counted in values over page_ids
    bias: torch.Tensor  # int64 [num_slots]: likewise the float32 biases; -1: none
    width: int  # values of a row

    @property
    def num_slots(self) -> int:
        return self.first.shape[0]
