"""Which tokens stand in the prompt and how often in the answer, on the device, for the rows whose penalties need it."""

from __future__ import annotations

import torch

from data_plane.plan import Int32Array
from kernels.devices import upload
from kernels.sampling import IN_ANSWER, IN_PROMPT

_FIRST_PLACES = 8


class TokenHistory:
    """A table of histories that grows with the rows that hold one; 4 bytes a token of the vocabulary and place."""

    def __init__(self, *, vocab_size: int, device: torch.device) -> None:
        self.table = torch.zeros(0, vocab_size, dtype=torch.int32, device=device)
        # Invariant: len(free) + places that rows hold == len(table).
        self._free: list[int] = []

    def take(self, prompt: Int32Array, answer: Int32Array) -> int:
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
        if len(answer):
            said = self._tokens(answer)
            history.scatter_add_(0, said, torch.full_like(said, IN_ANSWER, dtype=torch.int32))
        return place

    def release(self, place: int) -> None:
        """Give a place back."""
        self._free.append(place)

    def count(self, places: torch.Tensor, tokens: torch.Tensor) -> None:
        """Note one sampled token for each of these different places; both int64 [n] on the device."""
        self.table[places, tokens] += IN_ANSWER

    def clear(self) -> None:
        """Forget every history, and give the memory back."""
        self.table = self.table[:0].clone()
        self._free.clear()

    def _tokens(self, token_ids: Int32Array) -> torch.Tensor:
        return upload(token_ids.astype("int64"), self.table.device)
