"""The states of requests and of their sequences, and every move from one state to another.

Nothing else assigns a state. A move that the tables do not name is a bug of the scheduler, and raises AssertionError.
"""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from control_plane.scheduler.requests.sequence import Row, Sequence, SequenceGroup


class GroupState(enum.Enum):
    """Where a request is; each live request is in exactly one place."""

    WAITING = "waiting"  # in the waiting queue
    SWAPPED = "swapped"  # in the swapped queue: no rows, its blocks in host memory
    PAUSED = "paused"  # no rows, and its reader is slow: in no queue until the reader reads again
    RUNNING = "running"  # its sequences hold rows, and may be planned
    DRAINING = "draining"  # preempted or ended; a step in flight still names one of its sequences
    GONE = "gone"  # over, holds nothing


class SequenceState(enum.Enum):
    """What a sequence holds."""

    IDLE = "idle"  # no row: its group waits, or its completion ended
    FORKING = "forking"  # a row that the worker does not know, and blocks: begins once its source is computed
    RESERVED = "reserved"  # a row that the worker does not know, and one block, for a beam that may fork into it
    RUNNING = "running"  # a row; it may be planned
    DRAINING = "draining"  # a row; it is not planned any more and leaves with the last step in flight that names it


GROUP_MOVES: dict[GroupState, frozenset[GroupState]] = {
    GroupState.WAITING: frozenset({GroupState.RUNNING, GroupState.PAUSED, GroupState.GONE}),
    GroupState.SWAPPED: frozenset({GroupState.RUNNING, GroupState.GONE}),
    GroupState.PAUSED: frozenset({GroupState.WAITING, GroupState.GONE}),
    GroupState.RUNNING: frozenset({GroupState.DRAINING}),
    GroupState.DRAINING: frozenset({GroupState.WAITING, GroupState.SWAPPED, GroupState.PAUSED, GroupState.GONE}),
    GroupState.GONE: frozenset(),
}

SEQUENCE_MOVES: dict[SequenceState, frozenset[SequenceState]] = {
    SequenceState.IDLE: frozenset({SequenceState.RUNNING, SequenceState.FORKING, SequenceState.RESERVED}),
    SequenceState.FORKING: frozenset({SequenceState.RUNNING, SequenceState.DRAINING}),
    SequenceState.RESERVED: frozenset({SequenceState.FORKING, SequenceState.DRAINING}),
    SequenceState.RUNNING: frozenset({SequenceState.RESERVED, SequenceState.DRAINING}),
    SequenceState.DRAINING: frozenset({SequenceState.IDLE}),
}


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
