"""What rows, sequences and groups count, and that no other module writes it."""

from __future__ import annotations

import ast
from dataclasses import fields
from pathlib import Path

import pytest

from control_plane.scheduler.admission import make_group
from control_plane.scheduler.requests.sequence import (
    Row,
    Sequence,
    SequenceGroup,
    accept_next_tokens,
    plan_next_tokens,
)
from control_plane.scheduler.requests.states import SequenceState
from control_plane.scheduler.requests.transitions import take_row
from control_plane.scheduler.types import BeamSearch, RequestId, RequestOutput
from tests.control_plane.scheduler.factories import make_limits, make_request
from tests.ownership import written_fields

PACKAGE = Path(__file__).parents[4] / "control_plane" / "scheduler"
BLOCK_SIZE = 4


def make_row(request_id: int = 7, num_prompt: int = 10) -> Row:
    (sequence,) = make_group(make_request(request_id, num_prompt), make_limits(), 0).members
    row = Row(sequence, 0, None, SequenceState.RUNNING)
    take_row(sequence, row)
    return row


def test_a_row_counts_planned_and_computed_tokens_apart() -> None:
    row = make_row(num_prompt=10)
    row.start_at(4)
    row.note_registered(1, BLOCK_SIZE)
    assert (row.prefill_end, row.num_planned, row.num_computed, row.register_at) == (10, 4, 4, 8)
    row.plan_prefill(5)
    assert (row.num_planned, row.num_in_flight, row.is_decoding) == (9, 1, False)
    row.plan_prefill(1)
    assert (row.num_planned, row.num_in_flight, row.is_decoding) == (10, 2, True)
    row.plan_decodes(3)
    row.end_step()
    row.note_computed(5)
    assert (row.num_planned, row.num_in_flight, row.num_computed) == (13, 4, 9)


def test_blocks_that_a_row_shares_come_before_its_own() -> None:
    row = make_row()
    row.add_blocks([8])
    row.share_blocks([3, 5])
    assert row.block_ids == [3, 5, 8]
    assert row.move_blocks(2) == [3, 5]
    assert (row.moved_block_ids, row.block_ids) == ([3, 5], [8])


def test_the_block_that_a_row_copies_is_given_back_once() -> None:
    row = make_row()
    row.copy_from(4)
    assert (row.take_copied(), row.take_copied()) == (4, None)


def test_a_row_begins_once_and_waits_for_no_source_then() -> None:
    row = make_row()
    row.fork_from(row.sequence)
    row.begin()
    assert row.forks_from is None
    with pytest.raises(AssertionError, match="request 7 begins a row twice"):
        row.begin()


def test_rows_that_need_a_closer_look_are_planned_only_if_it_allows() -> None:
    rows = [make_row(), make_row(), make_row()]
    rows[0].plan_closely_at = 100
    looked_at: list[Row] = []

    def may_decode(row: Row) -> bool:
        looked_at.append(row)
        return row is rows[1]

    assert plan_next_tokens(rows, may_decode) == {rows[2]}
    assert looked_at == rows[1:]
    assert [(row.num_planned, row.num_in_flight) for row in rows] == [(1, 1), (1, 1), (0, 0)]


def test_plain_tokens_are_accepted_and_others_are_looked_at() -> None:
    rows = [make_row(request_id) for request_id in (1, 2, 3)]
    for row in rows:
        row.plan_decodes(1)
    rows[0].apply_closely_at = rows[2].apply_closely_at = 100
    token_ids = iter([11, 12, None, 14])
    accepted: list[tuple[RequestId, int]] = []
    looked_at: list[tuple[Row, int | None]] = []
    accept_next_tokens(rows, token_ids, accepted, lambda row, token_id: looked_at.append((row, token_id)))
    assert accepted == [(1, 11)]
    assert looked_at == [(rows[1], 12), (rows[2], None)]
    assert [(row.num_computed, row.num_in_flight) for row in rows] == [(1, 0), (0, 1), (0, 1)]
    assert list(token_ids) == [14], "the tokens of prefills follow those of decodes"


def test_a_group_loses_its_progress_with_its_last_row() -> None:
    group = make_group(make_request(1, num_samples=2), make_limits(), 0)
    for _ in group.members:
        group.note_row_taken(None, None)
    group.note_progress()
    group.note_row_left()
    assert group.has_progressed
    group.note_row_left()
    assert not group.has_progressed


def test_a_group_starts_for_the_first_time_once() -> None:
    group = make_group(make_request(1, 10), make_limits(), 0)
    group.note_overtaken()
    assert group.note_start(2.0, num_cached=12)
    assert (group.first_scheduled_s, group.num_cached_tokens, group.times_overtaken) == (2.0, 10, 0)
    assert not group.note_start(3.0, num_cached=0)
    assert (group.first_scheduled_s, group.num_cached_tokens) == (2.0, 10)


def test_candidates_of_beams_are_complete_with_the_last_beam() -> None:
    group = make_group(make_request(1, beam=BeamSearch(2)), make_limits(), 0)
    first, second = group.members
    group.go_on_with([second, first])
    assert not group.add_candidates(first, ((1, -1.0),))
    assert group.add_candidates(second, ((2, -2.0),))
    assert group.take_candidates() == [((2, -2.0),), ((1, -1.0),)]
    assert (group.num_searched, group.beam_candidates) == (2, {})


def test_a_beam_follows_another_and_is_planned_no_further_than_its_tokens() -> None:
    source, fork = make_group(make_request(1, 10, beam=BeamSearch(2)), make_limits(), 0).members
    source.append_chosen(5)
    fork.follow(source, 6)
    assert (fork.generated, fork.max_planned) == ([5, 6], 12)
    fork.forget_beam()
    assert (fork.generated, fork.block_hashes, fork.max_planned) == ([], [], 0)


def test_only_their_own_module_writes_fields_of_rows_sequences_and_groups() -> None:
    """Outputs have some fields of the same names. Groups are made in admission.py."""
    owned = {field.name for owner in (Row, Sequence, SequenceGroup) for field in fields(owner)}
    owned -= {"state", "row"}  # test_transitions.py
    owned -= {field.name for field in fields(RequestOutput)}
    found = {
        f"{path.relative_to(PACKAGE).as_posix()}: {name}"
        for path in PACKAGE.rglob("*.py")
        for name in written_fields(ast.parse(path.read_text()))
        if name in owned
    }
    assert {place for place in found if not place.startswith(("requests/sequence.py", "admission.py"))} == set()
    assert "requests/sequence.py: num_planned" in found
