"""The worker's log lines of a request that takes a row and leaves it."""

from __future__ import annotations

import logging

import numpy as np
import pytest

from data_plane.plan import NewRow, RowSampling, StepOutput, StepPlan
from data_plane.stream.row_log import RowLog

NEW = NewRow(
    row=3,
    token_ids=np.array([5, 6, 7, 8], np.int32),
    num_prompt_tokens=3,
    num_computed_tokens=2,
    block_ids=np.array([0], np.int32),
    slot=1,
    slot_generation=1,
    sampling=RowSampling(),
    request_id="cmpl-1",
    trace_id="0af7651916cd43dd8448eb211c80319c",
)


def lines_of(caplog: pytest.LogCaptureFixture, *rows: NewRow) -> list[str]:
    with caplog.at_level(logging.INFO):
        RowLog(7, 8).begin(StepPlan(step_id=9, new_rows=list(rows)))
    return [record.getMessage() for record in caplog.records]


def test_a_line_has_both_ids_and_what_begins(caplog: pytest.LogCaptureFixture) -> None:
    assert lines_of(caplog, NEW) == [
        "request begins request_id=cmpl-1 trace_id=0af7651916cd43dd8448eb211c80319c epoch=7 step_id=9 row=3 slot=1 "
        "prompt_tokens=3 known_tokens=4 cached_tokens=2"
    ]


def test_nobody_makes_a_second_line_and_a_row_without_an_id_has_none(caplog: pytest.LogCaptureFixture) -> None:
    forged = NewRow(
        row=0,
        token_ids=NEW.token_ids,
        num_prompt_tokens=4,
        num_computed_tokens=0,
        block_ids=NEW.block_ids,
        slot=None,
        slot_generation=0,
        sampling=RowSampling(),
        request_id="a\nrequest begins request_id=b",
    )
    unnamed = NewRow(0, NEW.token_ids, 4, 0, NEW.block_ids, None, 0, RowSampling())
    (line,) = lines_of(caplog, forged, unnamed)
    assert line.startswith(r"request begins request_id=a\nrequest begins request_id=b trace_id=- epoch=7")
    assert "\n" not in line and "slot=-" in line


def rows(*found: int) -> np.ndarray:
    return np.array(found, np.int32)


def output(step_id: int, *sampled: int, failed: tuple[int, ...] = (), broken: tuple[int, ...] = ()) -> StepOutput:
    return StepOutput(
        step_id, rows(*sampled), rows(*sampled), rows(*failed), step_time_us=1, unconstrained_rows=rows(*broken)
    )


BEGINS = StepPlan(1, new_rows=[NEW], prefills=np.array([[3, 1]], np.int32))
LEAVES = "request leaves request_id=cmpl-1 trace_id=0af7651916cd43dd8448eb211c80319c epoch=7 row=3 reason="


def test_a_request_that_is_freed_leaves_a_line_with_its_tokens_and_steps(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        log = RowLog(7, 8)
        log.count(BEGINS, output(1))  # a part of the prompt: nothing is sampled
        log.count(StepPlan(2, prefills=np.array([[3, 1]], np.int32)), output(2, 3))
        log.count(StepPlan(3), output(3, 0, 3))
        assert not caplog.records
        log.count(StepPlan(4, freed_rows=rows(3)), output(4, 0))
        log.close()
    assert [record.getMessage() for record in caplog.records] == [f"{LEAVES}freed sampled_tokens=2 steps=3"]


def test_the_next_request_of_a_row_begins_to_count_anew(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        log = RowLog(7, 8)
        log.count(BEGINS, output(1, 3))
        log.count(StepPlan(2, freed_rows=rows(3), new_rows=[NEW]), output(2))
        log.count(StepPlan(3, freed_rows=rows(3)), output(3))
    counts = [record.getMessage().removeprefix(LEAVES) for record in caplog.records]
    assert counts == ["freed sampled_tokens=1 steps=1", "freed sampled_tokens=0 steps=0"]


@pytest.mark.parametrize(("broken", "reason"), [((), "not_finite"), ((3,), "constraint_failed")])
def test_a_row_that_failed_says_why(caplog: pytest.LogCaptureFixture, broken: tuple[int, ...], reason: str) -> None:
    with caplog.at_level(logging.INFO):
        log = RowLog(7, 8)
        log.count(BEGINS, output(1, failed=(3,), broken=broken))
        log.count(StepPlan(2, freed_rows=rows(3)), output(2))
    assert caplog.records[-1].getMessage() == f"{LEAVES}{reason} sampled_tokens=0 steps=1"


def test_the_end_of_the_session_ends_what_is_left(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        log = RowLog(7, 8)
        log.count(BEGINS, output(1, 3))
        log.close()
    assert [record.getMessage() for record in caplog.records] == [f"{LEAVES}session_ended sampled_tokens=1 steps=1"]
