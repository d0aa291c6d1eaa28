"""The rows of a step's adapters that replace those of the embedding and the head."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from data_plane.adapters.arena.row_tables import RowTables
from kernels.lora import AdapterSegments
from kernels.token_rows import replace_embeddings, replace_logits


class RowStep:
    """Valid as long as the LoraStep of the same tokens."""

    def __init__(
        self, tables: RowTables, token_slots: torch.Tensor, segments: AdapterSegments, slots: Sequence[int]
    ) -> None:
        """token_slots is int32 [num_tokens] on the device; `slots` are those in it that replace rows."""
        self._tables = tables
        self._token_slots = token_slots
        self._segments = segments
        self._slots = list(slots)
        self._num_tokens = int(tables.host_num_tokens[self._slots].max(initial=tables.vocab_size))

    def known_ids(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Token ids that the model's own embedding knows: new ones become its last, and are replaced afterwards."""
        vocab_size = self._tables.vocab_size
        return token_ids.clamp(max=vocab_size - 1) if self._num_tokens > vocab_size else token_ids

    def embed(self, target_name: str, token_ids: torch.Tensor, y: torch.Tensor, multiplier: float) -> None:
        """Put the rows of the adapters into y [num_tokens, width], multiplied as the model multiplies its own."""
        slots = self._with_rows(target_name)
        replace_embeddings(
            y, token_ids, self._token_slots, self._tables.tables[target_name], slots, multiplier=multiplier
        )

    def logits(self, target_name: str, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """Logits [num_rows, tokens of the largest vocabulary of the step] of x [num_rows, in] and the model's own y.

        Columns past a row's own vocabulary mean nothing.
        """
        if self._num_tokens > y.shape[1]:
            wide = y.new_zeros(len(y), self._num_tokens)
            wide[:, : y.shape[1]] = y
            y = wide
        slots = self._with_rows(target_name)
        if slots:
            most = int(self._tables.host_counts[target_name][slots].max())
            table = self._tables.tables[target_name]
            replace_logits(y, x, self._token_slots, self._segments, table, slots, max_count=most)
        return y

    def _with_rows(self, target_name: str) -> list[int]:
        counts = self._tables.host_counts[target_name]
        return [slot for slot in self._slots if counts[slot]]
