"""The profile of a worker's first steps: what it counts, what it holds, and that its file is whole or not there."""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from data_plane.engine.engine import TorchEngine
from data_plane.plan import NewRow, StepOutput
from data_plane.profile import NativeRun, StepProfile, trace_events
from data_plane.spans import Span, span
from kernels.native import Run, clock_ns, recording
from tests.data_plane.engine.conftest import checkpoint, engine, shared_engine
from tests.data_plane.engine.planner import GREEDY, array, make_plan

__all__ = ["checkpoint", "engine", "shared_engine"]


@contextmanager
def no_runs() -> Iterator[list[NativeRun]]:
    yield []


def output(step_id: int, *rows: int) -> StepOutput:
    return StepOutput(step_id, array(list(rows)), array(list(rows)), array([]), 0)


def read(path: Path) -> list[dict[str, Any]]:
    events: list[dict[str, Any]] = json.loads(path.read_text(encoding="utf-8"))["traceEvents"]
    return events


def names_of(events: list[dict[str, Any]]) -> list[str]:
    return [event["name"] for event in events if event["ph"] == "X"]


def test_the_file_has_the_steps_with_work_and_nothing_behind_the_last(tmp_path: Path) -> None:
    path = tmp_path / "steps.json"
    profile = StepProfile(2, path, no_runs)
    with span("before"):
        pass
    profile.start()
    for step_id, rows in ((1, ()), (2, (0,)), (3, ()), (4, (0, 1)), (5, (0,))):
        with span(f"step {step_id}"):
            pass
        profile.end_step(make_plan(step_id), output(step_id, *rows))
        assert not list(tmp_path.iterdir()) or step_id >= 4
    profile.close()
    assert names_of(read(path)) == ["step 1", "step 2", "step 3", "step 4"]
    assert list(tmp_path.iterdir()) == [path]


def test_a_part_of_a_prefill_is_work(tmp_path: Path) -> None:
    profile = StepProfile(1, tmp_path / "steps.json", no_runs)
    profile.start()
    profile.end_step(make_plan(1, prefills=[(0, 5)]), output(1))
    profile.close()
    assert (tmp_path / "steps.json").exists()


def test_a_worker_that_ends_early_writes_nothing_and_says_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    profile = StepProfile(3, tmp_path / "steps.json", no_runs)
    profile.start()
    profile.end_step(make_plan(1), output(1, 0))
    profile.close()
    assert list(tmp_path.iterdir()) == []
    assert "the worker ended after 1 of 3 steps" in caplog.text
    with span("nobody collects this"):
        pass


def test_a_worker_that_never_attached_has_nothing_to_say(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    StepProfile(3, tmp_path / "steps.json", no_runs).close()
    assert caplog.text == ""


def test_a_file_that_cannot_be_written_costs_the_profile_alone(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "steps.json"
    path.mkdir()
    profile = StepProfile(1, path, no_runs)
    with caplog.at_level(logging.ERROR):
        profile.start()
        profile.end_step(make_plan(1), output(1, 0))
        profile.close()
    assert f"profile not written path={path}" in caplog.text
    assert list(tmp_path.iterdir()) == [path]


def test_a_second_session_goes_on_with_the_same_profile(tmp_path: Path) -> None:
    profile = StepProfile(2, tmp_path / "steps.json", no_runs)
    for step_id in (1, 2):
        profile.start()
        with span(f"session {step_id}"):
            pass
        profile.end_step(make_plan(step_id), output(step_id, 0))
    profile.close()
    assert names_of(read(tmp_path / "steps.json")) == ["session 1", "session 2"]


def test_ops_lie_one_behind_the_other_with_their_waits_inside() -> None:
    run = Run(("linear", "gate"), 1_000, np.array([[3_000, 4_000], [6_000, 6_000]]))
    events = trace_events([Span("forward", 7, 500, 9_000), Span("load an adapter", 8, 0, 2_000)], [run], 7, 99)
    threads = {event["tid"]: event["args"]["name"] for event in events if event["ph"] == "M"}
    assert threads == {7: "compute", 8: "adapter load"}
    complete = {(e["name"], e["tid"], e["ts"], e["dur"]) for e in events if e["ph"] == "X"}
    assert complete == {
        ("forward", 7, 0.5, 8.5),
        ("load an adapter", 8, 0.0, 2.0),
        ("linear", 7, 1.0, 3.0),
        ("wait for other threads", 7, 3.0, 1.0),
        ("gate", 7, 4.0, 2.0),
    }
    assert {event["pid"] for event in events} == {99}


def test_a_step_of_the_engine_shows_its_parts_and_its_native_ops(tmp_path: Path, engine: TorchEngine) -> None:
    profile = StepProfile(2, tmp_path / "steps.json", recording)
    profile.start()
    new = NewRow(0, array([1, 2, 3]), 3, 0, array([0]), None, 0, GREEDY)
    began_ns = clock_ns()
    for step in (make_plan(1, new=[new], prefills=[(0, 3)]), make_plan(2)):
        with span("step"):
            result = engine.execute(step)
        profile.end_step(step, result)
    profile.close()
    events = [event for event in read(tmp_path / "steps.json") if event["ph"] == "X"]
    steps = [event for event in events if event["name"] == "step"]
    assert [event["name"] for event in events].count("step") == 2
    for name in ("apply the plan", "build the batch", "forward", "sample"):
        for step_event, part in zip(steps, [e for e in events if e["name"] == name], strict=True):
            assert step_event["ts"] <= part["ts"]
            assert part["ts"] + part["dur"] <= step_event["ts"] + step_event["dur"]
    forwards = [event for event in events if event["name"] == "forward"]
    ops = [event for event in events if event["name"].startswith("attention")]
    assert ops, "attention ran natively"
    for op in ops:
        assert any(f["ts"] <= op["ts"] and op["ts"] + op["dur"] <= f["ts"] + f["dur"] for f in forwards)
    assert min(event["ts"] for event in events) >= began_ns / 1000
    assert {event["tid"] for event in events} == {threading.get_ident()}
