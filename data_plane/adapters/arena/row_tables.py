"""Rows of adapters that replace those of the embedding and the head: where they lie, as kernels and the host read it.

A part of the slot table, which says when rows of a slot are entered and removed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from data_plane.adapters.arena.pages import PagePool
from data_plane.plan import TargetKind, TargetModule
from kernels.devices import put_number
from kernels.token_rows import RowTable

OUTER_KINDS = (TargetKind.EMBEDDING, TargetKind.HEAD)


@dataclass(frozen=True, slots=True)
class RowPages:
    """Where one adapter's rows of one embedding or head lie. Indices count within the adapter's own pages."""

    num_rows: int
    first: int  # page
    ids: int  # index within the adapter's vectors
    bias: int | None  # likewise; None: the rows have no biases


class RowTables:
    """The replaced rows of every slot, by target module."""

    def __init__(self, targets: Sequence[TargetModule], num_slots: int, pool: PagePool, page_ids: torch.Tensor) -> None:
        outer = [target for target in targets if target.kind in OUTER_KINDS]
        self._values_per_page = pool.values_per_page
        self.tables = {
            target.name: RowTable(
                pool.pages,
                pool.values,
                page_ids,
                first=torch.zeros(num_slots, dtype=torch.int32, device=page_ids.device),
                count=torch.zeros(num_slots, dtype=torch.int32, device=page_ids.device),
                ids=torch.full((num_slots,), -1, dtype=torch.int64, device=page_ids.device),
                bias=torch.full((num_slots,), -1, dtype=torch.int64, device=page_ids.device),
                width=row_width(target),
            )
            for target in outer
        }
        # Tokens of the model's own vocabulary; 0 where neither embedding nor head takes adapters.
        self.vocab_size = max((_vocab_size(target) for target in outer), default=0)
        # On the host by slot: rows of each module, and tokens of the adapter's vocabulary.
        self.host_counts = {name: np.zeros(num_slots, dtype=np.int64) for name in self.tables}
        self.host_num_tokens = np.full(num_slots, self.vocab_size)
        self.host_has_rows = np.zeros(num_slots, dtype=np.bool_)

    def put(
        self, slot: int, rows: Mapping[str, RowPages], num_tokens: int | None, start: int, first_vector_page: int
    ) -> None:
        """Enter an adapter whose pages begin at `start` in page_ids, or enter it again at another place."""
        self.remove(slot)
        begin = (start + first_vector_page) * self._values_per_page
        for name, part in rows.items():
            table = self.tables[name]
            put_number(table.first, slot, start + part.first)
            put_number(table.count, slot, part.num_rows)
            put_number(table.ids, slot, begin + part.ids)
            put_number(table.bias, slot, -1 if part.bias is None else begin + part.bias)
            self.host_counts[name][slot] = part.num_rows
        self.host_has_rows[slot] = bool(rows)
        self.host_num_tokens[slot] = self.vocab_size if num_tokens is None else num_tokens

    def remove(self, slot: int) -> None:
        """Empty a slot."""
        if self.host_has_rows[slot]:
            for name, table in self.tables.items():
                put_number(table.count, slot, 0)
                self.host_counts[name][slot] = 0
            self.host_has_rows[slot] = False
        self.host_num_tokens[slot] = self.vocab_size


def row_width(target: TargetModule) -> int:
    """Values of a row of an embedding or a head."""
    return target.out_features if target.kind is TargetKind.EMBEDDING else target.in_features


def _vocab_size(target: TargetModule) -> int:
    return target.in_features if target.kind is TargetKind.EMBEDDING else target.out_features
