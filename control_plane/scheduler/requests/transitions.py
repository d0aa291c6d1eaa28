"""Every move of a request or a sequence from one state to another. Nothing else assigns a state or a row.

A move that the table in states.py does not name is a bug of the scheduler, and raises AssertionError.
"""

from __future__ import annotations

from control_plane.scheduler.requests.sequence import Row, Sequence, SequenceGroup
from control_plane.scheduler.requests.states import GROUP_MOVES, SEQUENCE_MOVES, GroupState, SequenceState


def move_group(group: SequenceGroup, to: GroupState) -> None:
    """Move a request to a state; to stay in its state is allowed."""
    is_allowed = to is group.state or to in GROUP_MOVES[group.state]
    assert is_allowed, f"request {group.request.request_id} moves from {group.state.value} to {to.value}"
    group.state = to


def move_row(row: Row, to: SequenceState) -> None:
    """Move a sequence that holds a row, and goes on holding it, to a state."""
    _check_sequence(row.sequence, row.state, to)
    row.state = to


def take_row(sequence: Sequence, row: Row) -> None:
    """Give a sequence a new row, in the state that the row was made with. A former row of the sequence is dropped."""
    _check_sequence(sequence, sequence.state, row.state)
    sequence.row = row


def drop_row(sequence: Sequence) -> None:
    """Take the row of a sequence away, and everything that holds only while it has one."""
    _check_sequence(sequence, sequence.state, SequenceState.IDLE)
    sequence.row = None


def _check_sequence(sequence: Sequence, state: SequenceState, to: SequenceState) -> None:
    assert to in SEQUENCE_MOVES[state], (
        f"sequence {sequence.index} of request {sequence.request_id} moves from {state.value} to {to.value}"
    )
