"""The rows that decode, as step after step plans the same ones.

From one step to the next hardly a row joins or leaves, so which rows decode is found out once and kept until one does.
Plans, steps in flight and the wire share the batch's lists and never change them.
"""

from __future__ import annotations

from collections import Counter
from functools import cached_property
from operator import attrgetter

from control_plane.scheduler.requests.sequence import Row
from control_plane.scheduler.requests.states import SequenceState

_row_idx = attrgetter("row_idx")
_account = attrgetter("sequence.account")


class DecodeBatch:
    """Rows that decode in one step."""

    def __init__(self, rows: list[Row]) -> None:
        """`rows` are in order of arrival."""
        self.rows = rows
        self.by_idx = sorted(rows, key=_row_idx)
        self.row_idxs = [row.row_idx for row in self.by_idx]

    def __len__(self) -> int:
        return len(self.rows)

    @cached_property
    def num_rows_by_account(self) -> Counter[str]:
        """How many of the rows each account has."""
        return Counter(map(_account, self.rows))


def by_progress(held: list[Row]) -> tuple[list[Row], list[Row]]:
    """The held rows that may decode in the next plan, and the held rows that still prefill."""
    decoding: list[Row] = []
    prefilling: list[Row] = []
    is_running = SequenceState.RUNNING
    for row in held:
        if not row.is_decoding:
            prefilling.append(row)
        elif row.state is is_running:
            sequence = row.sequence
            # Else all its tokens are planned, or the next one is not chosen yet.
            if row.num_planned < sequence.max_planned and not sequence.group.is_paused:
                decoding.append(row)
    return decoding, prefilling
