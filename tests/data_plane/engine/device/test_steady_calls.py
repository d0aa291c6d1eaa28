"""Python's part of a steady decode step: the same calls and the same lines for any rows and adapters."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch

from data_plane.engine.device.step_graphs import Graph
from data_plane.engine.engine import TorchEngine
from kernels import native
from tests.data_plane.engine.device.launch_traces import launches_noted
from tests.data_plane.engine.device.recorded_rig import Rig
from tests.data_plane.engine.device.reruns import Body

# Functions of Python that a step calls, the plan's and the results' included: without adapters and with them.
MOST_CALLS = (160, 200)
ROWS = 8
TraceFunction = Callable[[FrameType, str, object], Any]


class Silent:
    """A recorder whose replays do nothing: a device replays a graph without Python."""

    def record(self, body: Body) -> Graph:
        with launches_noted(None):
            return Silently(body())


class Silently:
    """One recorded step."""

    def __init__(self, outputs: tuple[torch.Tensor, torch.Tensor]) -> None:
        self.outputs = outputs

    def replay(self) -> None:
        pass


@pytest.fixture(autouse=True)
def _native_settings_of_this_test() -> Iterator[None]:
    usual = native.settings()
    yield
    native.configure(usual)


def python_of_a_step(rig: Rig) -> tuple[int, int]:
    """Functions that one step calls and lines that it runs, behind two that bring rows and adapters to the device."""
    rig.decode()
    rig.decode()
    calls = lines = 0

    def note_line(_frame: FrameType, event: str, _argument: object) -> TraceFunction:
        nonlocal lines
        lines += event == "line"
        return note_line

    def note_call(frame: FrameType, _event: str, _argument: object) -> TraceFunction | None:
        nonlocal calls
        if calls or frame.f_code is TorchEngine.execute.__code__:
            calls += 1
            return note_line
        return None

    former = sys.gettrace()
    gc.disable()  # what it finalises calls functions too
    sys.settrace(note_call)
    try:
        rig.decode()
    finally:
        sys.settrace(former)
        gc.enable()
    return calls, lines


@pytest.mark.parametrize("slots", [[None], [0], [0, 1, None]], ids=["base", "one adapter", "mixed"])
def test_a_step_runs_no_more_python_for_more_rows(tmp_path: Path, slots: list[int | None]) -> None:
    rig = Rig("llama", tmp_path, Silent())
    rig.load(0, rank=4)
    rig.load(1, rank=8)
    rig.record(ROWS)
    for row in range(2):
        rig.add(row, slots[row % len(slots)])
    few = python_of_a_step(rig)
    for row in range(2, ROWS):
        rig.add(row, slots[row % len(slots)])
    assert python_of_a_step(rig) == few
    assert 0 < few[0] <= MOST_CALLS[slots != [None]]
