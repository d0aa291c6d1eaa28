"""What is known of a row that may draft: its tokens, how often its drafts were right, results that came early."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

import numpy as np

from data_plane.plan import Int32Array, RowLogprobs

# Tokens of a row in which its last ones are searched: about 10 us on one core of an EPYC.
WINDOW = 8192
_LONGEST, _SHORTEST = 3, 2  # tokens that must be found again for a draft
_WEIGHT = 0.25  # of the latest draft that was compared in a row's share of accepted drafts
_FIRST_SHARE = 0.6  # of a row that was not measured yet: three rejected passes end its drafts
_LEAST_SHARE = 0.3  # of drafts accepted; below it a row stops drafting
_SHARE_AFTER_PAUSE = 0.4  # so that two bad passes end the retry
_MOST_DRAFTS = 16
FIRST_PAUSE, _LONGEST_PAUSE = 32, 512  # tokens until a row that stopped drafts again; doubled each time


@dataclass(frozen=True, slots=True)
class EarlyToken:
    """The result of one row for one step."""

    token_id: int
    is_failed: bool = False
    is_unconstrained: bool = False  # its constraint failed
    logprobs: RowLogprobs | None = None


@dataclass(slots=True)
class DraftRow:
    """What is known of one row that may draft."""

    tokens: Int32Array  # [capacity] prompt and completion
    num_tokens: int
    share: float = _FIRST_SHARE  # running mean: how likely a draft is accepted if those before it are
    pause: int = 0  # tokens left until it drafts again
    next_pause: int = FIRST_PAUSE
    num_measured: int = 0  # drafts that `share` comes from
    tried: tuple[int, list[int]] = (0, [])  # drafts that were not verified, and the tokens that were known before them
    early: deque[EarlyToken] = field(default_factory=deque)  # results ahead of the plan's steps

    def append(self, token_id: int) -> None:
        """The row sampled a token."""
        if self.num_tokens == len(self.tokens):
            self.tokens = np.concatenate([self.tokens, np.zeros_like(self.tokens)])
        self.tokens[self.num_tokens] = token_id
        self.num_tokens += 1
        self.pause = max(self.pause - 1, 0)

    def note_verified(self, num_accepted: int, num_drafted: int) -> None:
        """A pass accepted so many of the row's drafts. A row that gains too little pauses, and longer each time.

        Drafts behind the first rejected one say nothing: of 3 drafts with 1 accepted, one of two tries was right. Each
        try counts, so that a row whose drafts are all right is known after few passes.
        """
        num_tries = min(num_accepted + 1, num_drafted)
        share = num_accepted / num_tries
        self.num_measured += num_tries
        self.share += (share - self.share) * max(1 - (1 - _WEIGHT) ** num_tries, num_tries / (1 + self.num_measured))
        if self.share < _LEAST_SHARE:
            self.pause, self.next_pause = self.next_pause, min(2 * self.next_pause, _LONGEST_PAUSE)
            self.share = _SHARE_AFTER_PAUSE
        elif share == 1:
            self.next_pause = FIRST_PAUSE

    def compare_tried(self) -> None:
        """Learn from drafts that no pass verified, once the tokens in their place are known. This costs no pass."""
        known, drafts = self.tried
        if drafts and known + len(drafts) <= self.num_tokens:
            right = self.tokens[known : known + len(drafts)] == drafts
            self.tried = 0, []
            self.note_verified(len(drafts) if right.all() else int(right.argmin()), len(drafts))

    def look_up(self) -> list[int]:
        """What followed the row's last tokens where they occurred before, at the latest place; empty: nowhere."""
        if self.pause > 0:
            return []
        tokens = self.tokens[max(self.num_tokens - WINDOW, 0) : self.num_tokens]
        for length in range(_LONGEST, _SHORTEST - 1, -1):
            if len(tokens) <= length:
                continue
            ends = np.flatnonzero(tokens[length - 1 : -1] == tokens[-1]) + length - 1
            for back in range(1, length):
                ends = ends[tokens[ends - back] == tokens[-1 - back]]
            if len(ends):
                following: list[int] = tokens[int(ends[-1]) + 1 :][:_MOST_DRAFTS].tolist()
                # What is followed by fewer tokens than a draft may have is a loop, which goes on as before.
                return (following * _MOST_DRAFTS)[:_MOST_DRAFTS]
        return []
