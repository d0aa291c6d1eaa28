"""What the layers of one model know about the current step. The engine writes it, attention and linears read it.

One object per model, made at load and never replaced: every layer holds a reference to it.
"""

from __future__ import annotations

import torch

from data_plane.adapters.step.lora_step import LoraStep
from data_plane.adapters.step.row_step import RowStep
from kernels.paged_attention import AttentionBatch, RowBatch

TableHalves = tuple[torch.Tensor, torch.Tensor]


class StepContext:
    """The current step; between steps everything is None."""

    def __init__(self) -> None:
        self.attention: AttentionBatch | RowBatch | None = None
        self.kv_positions: torch.Tensor | None = None  # int64 [num_tokens]: where each token's KV goes
        self.lora: LoraStep | None = None  # None: no token of the step has an adapter
        self.head_lora: LoraStep | None = None  # adapters of the rows that the head sees; None: none targets the head
        # Rows of embedding and head that adapters replace, for all tokens and for those that the head sees.
        self.rows: RowStep | None = None
        self.head_rows: RowStep | None = None
        # The tables of the step's tokens as transformers makes them, and the halves that rotations read.
        self._tables: tuple[TableHalves, TableHalves] | None = None

    def halves(self, tables: TableHalves) -> TableHalves:
        """cos and sin [num_tokens, n] of tables [1, num_tokens, 2 n], which hold every value twice.

        All layers of a step have the same tables, mostly, and cut them once.
        """
        if self._tables is None or self._tables[0] is not tables:
            half = tables[0].shape[-1] // 2
            cos, sin = (table[0, :, :half] for table in tables)
            self._tables = (tables, (cos, sin))
        return self._tables[1]

    def begin(
        self,
        attention: AttentionBatch | RowBatch,
        kv_positions: torch.Tensor,
        lora: LoraStep | None,
        head_lora: LoraStep | None = None,
        rows: RowStep | None = None,
        head_rows: RowStep | None = None,
    ) -> None:
        """Set the step for the forward pass that follows."""
        self.attention = attention
        self.kv_positions = kv_positions
        self.lora = lora
        self.head_lora = head_lora
        self.rows = rows
        self.head_rows = head_rows

    def end(self) -> None:
        """Forget the step."""
        self.attention = None
        self.kv_positions = None
        self.lora = None
        self.head_lora = None
        self.rows = None
        self.head_rows = None
        self._tables = None
