"""The worker's log line of a request that begins."""

from __future__ import annotations

import logging

import numpy as np
import pytest

from data_plane.plan import NewRow, RowSampling, StepPlan
from data_plane.stream.row_log import log_new_rows

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
        log_new_rows(StepPlan(step_id=9, new_rows=list(rows)), 7)
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
