"""The rows that decode, as step after step plans the same ones.

From one step to the next hardly a row joins or leaves, so who decodes is found out once and kept by the roster until
somebody does. Plans, flights and the wire share the batch's lists; nobody changes them.
"""

from __future__ import annotations

from collections import Counter
from functools import cached_property
from operator import attrgetter

from control_plane.scheduler.requests.sequence import Sequence, SequenceState

_row = attrgetter("row")
_account = attrgetter("account")


class DecodeBatch:
    """Sequences that decode in one step."""

    def __init__(self, sequences: list[Sequence]) -> None:
        """`sequences` are in order of arrival."""
        self.sequences = sequences
        self.by_row = sorted(sequences, key=_row)
        self.rows = [sequence.row for sequence in self.by_row]

    def __len__(self) -> int:
        return len(self.sequences)

    @cached_property
    def num_rows_by_account(self) -> Counter[str]:
        """How many of the rows are whose."""
        return Counter(map(_account, self.sequences))


def by_progress(running: list[Sequence]) -> tuple[list[Sequence], list[Sequence]]:
    """Of those that hold a row: who may decode in the next plan, and who is before the end of its prefill."""
    decoding: list[Sequence] = []
    prefilling: list[Sequence] = []
    is_running = SequenceState.RUNNING
    for sequence in running:
        if not sequence.is_decoding:
            prefilling.append(sequence)
        elif (
            sequence.num_planned < sequence.max_planned  # else all is planned, or the next token is not chosen yet
            and sequence.state is is_running
            and not sequence.group.is_paused
        ):
            decoding.append(sequence)
    return decoding, prefilling
