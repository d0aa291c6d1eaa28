"""A move between states that the tables do not name is refused, and states are assigned in one module."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from control_plane.scheduler.admission import make_group
from control_plane.scheduler.requests.sequence import Row
from control_plane.scheduler.requests.states import GROUP_MOVES, SEQUENCE_MOVES, GroupState, SequenceState
from control_plane.scheduler.requests.transitions import drop_row, move_group, move_row, take_row
from tests.control_plane.scheduler.factories import make_limits, make_request

PACKAGE = Path(__file__).parents[4] / "control_plane" / "scheduler"


@pytest.mark.parametrize("before", GroupState)
@pytest.mark.parametrize("after", GroupState)
def test_a_request_moves_as_the_table_says(before: GroupState, after: GroupState) -> None:
    group = make_group(make_request(7), make_limits(), 0)
    group.state = before
    if after is before or after in GROUP_MOVES[before]:
        move_group(group, after)
        assert group.state is after
    else:
        with pytest.raises(AssertionError, match=f"request 7 moves from {before.value} to {after.value}"):
            move_group(group, after)
        assert group.state is before


@pytest.mark.parametrize("before", [state for state in SequenceState if state is not SequenceState.IDLE])
@pytest.mark.parametrize("after", SequenceState)
def test_a_sequence_with_a_row_moves_as_the_table_says(before: SequenceState, after: SequenceState) -> None:
    (sequence,) = make_group(make_request(7), make_limits(), 0).members
    sequence.row = Row(sequence, 0, None, before)
    if after in SEQUENCE_MOVES[before]:
        drop_row(sequence) if after is SequenceState.IDLE else move_row(sequence.row, after)
        assert sequence.state is after
    else:
        with pytest.raises(AssertionError, match=f"sequence 0 of request 7 moves from {before.value} to {after.value}"):
            drop_row(sequence) if after is SequenceState.IDLE else move_row(sequence.row, after)
        assert sequence.state is before


def test_a_sequence_takes_one_row_at_a_time() -> None:
    (sequence,) = make_group(make_request(7), make_limits(), 0).members
    with pytest.raises(AssertionError, match="sequence 0 of request 7 holds no row"):
        _ = sequence.held_row
    take_row(sequence, Row(sequence, 0, None, SequenceState.RUNNING))
    with pytest.raises(AssertionError, match="moves from running to forking"):
        take_row(sequence, Row(sequence, 1, None, SequenceState.FORKING))


def test_only_one_module_assigns_states_and_rows() -> None:
    """Slots of adapters have states of their own."""
    found = {
        path.relative_to(PACKAGE).as_posix()
        for path in PACKAGE.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Assign | ast.AugAssign | ast.AnnAssign)
        for target in (node.targets if isinstance(node, ast.Assign) else [node.target])
        for leaf in ast.walk(target)
        if isinstance(leaf, ast.Attribute) and leaf.attr in ("state", "row") and isinstance(leaf.ctx, ast.Store)
    }
    assert found == {"requests/transitions.py", "memory/adapter_slots.py"}
