"""The states of requests and of their sequences, and the table of allowed moves from state to state."""

from __future__ import annotations

import enum


class GroupState(enum.Enum):
    """Where a request is; each live request is in exactly one place."""

    WAITING = "waiting"  # in the waiting queue
    SWAPPED = "swapped"  # in the swapped queue: no rows, its blocks in host memory
    PAUSED = "paused"  # no rows, and its reader is slow: in no queue until the reader reads again
    RUNNING = "running"  # its sequences hold rows, and may be planned
    LEAVING = "leaving"  # preempted or ended; a step in flight still names one of its sequences
    GONE = "gone"  # over, holds nothing


class SequenceState(enum.Enum):
    """What a sequence holds."""

    IDLE = "idle"  # no row: its group waits, or its completion ended
    FORKING = "forking"  # a row that the worker does not know, and blocks: begins once its source is computed
    RESERVED = "reserved"  # a row that the worker does not know, and one block, for a beam that may fork into it
    RUNNING = "running"  # a row; it may be planned
    LEAVING = "leaving"  # a row; it is not planned any more and leaves with the last step in flight that names it


GROUP_MOVES: dict[GroupState, frozenset[GroupState]] = {
    GroupState.WAITING: frozenset({GroupState.RUNNING, GroupState.PAUSED, GroupState.GONE}),
    GroupState.SWAPPED: frozenset({GroupState.RUNNING, GroupState.GONE}),
    GroupState.PAUSED: frozenset({GroupState.WAITING, GroupState.GONE}),
    GroupState.RUNNING: frozenset({GroupState.LEAVING}),
    GroupState.LEAVING: frozenset({GroupState.WAITING, GroupState.SWAPPED, GroupState.PAUSED, GroupState.GONE}),
    GroupState.GONE: frozenset(),
}

SEQUENCE_MOVES: dict[SequenceState, frozenset[SequenceState]] = {
    SequenceState.IDLE: frozenset({SequenceState.RUNNING, SequenceState.FORKING, SequenceState.RESERVED}),
    SequenceState.FORKING: frozenset({SequenceState.RUNNING, SequenceState.LEAVING}),
    SequenceState.RESERVED: frozenset({SequenceState.FORKING, SequenceState.LEAVING}),
    SequenceState.RUNNING: frozenset({SequenceState.RESERVED, SequenceState.LEAVING}),
    SequenceState.LEAVING: frozenset({SequenceState.IDLE}),
}
