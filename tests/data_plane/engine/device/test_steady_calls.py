"""Python's part of a steady decode step: the same number of calls for any rows and adapters."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

import pytest
import torch

from data_plane.engine.device.step_graphs import Graph
from data_plane.engine.engine import TorchEngine
from kernels import native
from tests.data_plane.engine.device.launch_traces import launches_noted
from tests.data_plane.engine.device.recorded_rig import Rig
from tests.data_plane.engine.device.reruns import Body

# Functions of Python that a step calls, the plan's and the results' included.
MOST_CALLS = 250
ROWS = 8


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


def calls_of_a_step(rig: Rig) -> int:
    """Functions of Python that one step calls, behind two that bring rows and adapters to the device."""
    rig.decode()
    rig.decode()
    count = depth = 0

    def note(frame: FrameType, event: str, _argument: object) -> None:
        nonlocal count, depth
        if event == "call" and (depth or frame.f_code is TorchEngine.execute.__code__):
            count, depth = count + 1, depth + 1
        elif event == "return" and depth:
            depth -= 1

    former = sys.getprofile()
    gc.disable()  # what it finalises calls functions too
    sys.setprofile(note)
    try:
        rig.decode()
    finally:
        sys.setprofile(former)
        gc.enable()
    return count


@pytest.mark.parametrize("slots", [[None], [0], [0, 1, None]], ids=["base", "one adapter", "mixed"])
def test_a_step_calls_no_more_functions_for_more_rows(tmp_path: Path, slots: list[int | None]) -> None:
    rig = Rig("llama", tmp_path, Silent())
    rig.load(0, rank=4)
    rig.load(1, rank=8)
    rig.record(ROWS)
    for row in range(2):
        rig.add(row, slots[row % len(slots)])
    few = calls_of_a_step(rig)
    for row in range(2, ROWS):
        rig.add(row, slots[row % len(slots)])
    assert 0 < calls_of_a_step(rig) == few <= MOST_CALLS
