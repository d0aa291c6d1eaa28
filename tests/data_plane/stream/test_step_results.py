"""Results of steps leave in order, whichever thread has them."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from data_plane.plan import DoneStep, StepOutput, StepPlan, no_rows
from data_plane.stream.step_results import StepFailed, StepResults

LONG_S = 30.0


class Slow:
    """A step whose device ends it when the test says so."""

    def __init__(self, step_id: int, error: Exception | None = None) -> None:
        self.step_id = step_id
        self.ended = threading.Event()
        self._output = output(step_id)
        self._error = error

    def is_done(self) -> bool:
        return self.ended.is_set()

    def wait(self) -> StepOutput:
        assert self.ended.wait(LONG_S)
        if self._error is not None:
            raise self._error
        return self._output


class Rig:
    def __init__(self) -> None:
        self.handed: list[tuple[int, bool]] = []  # step, and whether on this thread
        self.failed = threading.Event()
        self.results = StepResults(self._hand_on, self.failed.set)
        self._thread = threading.get_ident()

    def _hand_on(self, step: StepPlan, found: StepOutput) -> None:
        assert step.step_id == found.step_id
        self.handed.append((step.step_id, threading.get_ident() == self._thread))


def output(step_id: int) -> StepOutput:
    return StepOutput(step_id, no_rows(), np.zeros(0, dtype=np.int32), no_rows(), 1)


def test_results_that_are_there_leave_on_the_thread_of_the_steps() -> None:
    rig = Rig()
    for step_id in (1, 2, 3):
        rig.results.add(StepPlan(step_id), DoneStep(output(step_id)))
    assert rig.handed == [(1, True), (2, True), (3, True)]
    assert not any(thread.name == "step-results" for thread in threading.enumerate())
    rig.results.close()


def test_steps_are_submitted_while_a_device_computes() -> None:
    """And a step that is done leaves after those before it."""
    rig = Rig()
    slow = [Slow(1), Slow(2)]
    for pending in slow:
        rig.results.add(StepPlan(pending.step_id), pending)
    rig.results.add(StepPlan(3), DoneStep(output(3)))
    assert rig.handed == []
    slow[1].ended.set()
    assert rig.handed == [], "the first step has not ended"
    slow[0].ended.set()
    rig.results.wait_for_all()
    assert rig.handed == [(1, False), (2, False), (3, False)]
    rig.results.add(StepPlan(4), DoneStep(output(4)))
    assert rig.handed[-1] == (4, True)
    rig.results.close()


def test_an_error_of_the_device_ends_the_steps_behind_it() -> None:
    rig = Rig()
    first, broken, behind = Slow(1), Slow(2, RuntimeError("the device is lost")), Slow(3)
    for step_id, pending in enumerate((first, broken, behind), start=1):
        rig.results.add(StepPlan(step_id), pending)
    for pending in (first, broken, behind):
        pending.ended.set()
    assert rig.failed.wait(LONG_S)
    rig.results.wait_for_all()
    assert rig.handed == [(1, False)]
    with pytest.raises(StepFailed, match="step 2: the device is lost") as failure:
        rig.results.add(StepPlan(4), DoneStep(output(4)))
    assert failure.value.step_id == 2 and isinstance(failure.value.error, RuntimeError)
    rig.results.close()


def test_after_the_end_of_a_session_nothing_leaves() -> None:
    rig = Rig()
    slow = [Slow(1), Slow(2)]
    for step_id, pending in enumerate(slow, start=1):
        rig.results.add(StepPlan(step_id), pending)
    closing = threading.Thread(target=rig.results.close)
    closing.start()
    while not rig.results.is_closed:
        pass
    for pending in slow:
        pending.ended.set()
    closing.join(LONG_S)
    assert not closing.is_alive() and rig.handed == []
