"""Counts, on the device, of the tokens in each row's prompt and completion, for rows with penalties."""

from __future__ import annotations

import torch

from data_plane.plan import Int32Array
from kernels.devices import upload
from kernels.sampling import IN_COMPLETION, IN_PROMPT

_FIRST_PLACES = 8


class TokenHistory:
    """A table with one history for each row with penalties; 4 bytes for each place and token of the vocabulary."""

    def __init__(self, *, vocab_size: int, device: torch.device) -> None:
        self.table = torch.zeros(0, vocab_size, dtype=torch.int32, device=device)
        # Invariant: len(_free) + places of rows == len(table).
        self._free: list[int] = []

    @property
    def num_held(self) -> int:
        """Histories that rows hold."""
        return len(self.table) - len(self._free)

    def take(self, prompt: Int32Array, completion: Int32Array) -> int:
        """The place of a new history that holds these tokens."""
        if not self._free:
            size = len(self.table)
            grown = self.table.new_zeros(max(2 * size, _FIRST_PLACES), self.table.shape[1])
            grown[:size] = self.table
            self.table = grown
            self._free = list(range(size, len(grown)))[::-1]
        place = self._free.pop()
        history = self.table[place].zero_()
        history[self._tokens(prompt)] = IN_PROMPT
        if len(completion):
            generated = self._tokens(completion)
            history.scatter_add_(0, generated, torch.full_like(generated, IN_COMPLETION, dtype=torch.int32))
        return place

    def release(self, place: int) -> None:
        """Give a place back."""
        self._free.append(place)

    def count(self, places: torch.Tensor, tokens: torch.Tensor) -> None:
        """Count one sampled token at each place; both int64 [n] on the device, no place twice."""
        self.table[places, tokens] += IN_COMPLETION

    def clear(self) -> None:
        """Forget every history, and give the memory back."""
        self.table = self.table[:0].clone()
        self._free.clear()

    def _tokens(self, token_ids: Int32Array) -> torch.Tensor:
        return upload(token_ids.astype("int64"), self.table.device)
