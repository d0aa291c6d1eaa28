"""Hands on the results of steps in their order. A thread waits for those that a device still computes."""

from __future__ import annotations

import threading
from collections.abc import Callable
from queue import SimpleQueue

from data_plane.plan import PendingStep, StepOutput, StepPlan


class StepFailed(Exception):
    """A step that was submitted has no results."""

    def __init__(self, step_id: int, error: Exception) -> None:
        super().__init__(f"step {step_id}: {error}")
        self.step_id = step_id
        self.error = error


class StepResults:
    """The results of one session. The compute thread calls every method."""

    def __init__(self, hand_on: Callable[[StepPlan, StepOutput], None], on_failure: Callable[[], None]) -> None:
        """`hand_on` gets each step and its results, one at a time: on the thread that added the step where they had
        come already, else on a thread of this object. `on_failure` is called there once if a step has no results."""
        self._hand_on = hand_on
        self._on_failure = on_failure
        self._steps: SimpleQueue[tuple[StepPlan, PendingStep] | None] = SimpleQueue()
        self._thread: threading.Thread | None = None  # a CPU needs none
        self._num_waiting = 0
        self._changed = threading.Condition()
        self._failure: StepFailed | None = None
        self.is_closed = False

    def add(self, step: StepPlan, pending: PendingStep) -> None:
        """Hand the results on when they come. Raises StepFailed if an earlier step has none."""
        self.raise_failure()
        with self._changed:
            is_first = self._num_waiting == 0
            if not (is_first and pending.is_done()):
                self._num_waiting += 1
                is_first = False
        if is_first:
            self._hand_on(step, pending.wait())
            return
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="step-results", daemon=True)
            self._thread.start()
        self._steps.put((step, pending))

    def raise_failure(self) -> None:
        """Raise StepFailed if a step has no results."""
        if self._failure is not None:
            raise self._failure

    def wait_for_all(self) -> None:
        """Wait until every result was handed on, or a step failed."""
        with self._changed:
            self._changed.wait_for(lambda: self._num_waiting == 0 or self._failure is not None)

    def close(self) -> None:
        """Hand on nothing more, and wait for the thread: for the one step that it may be waiting for."""
        self.is_closed = True
        self._steps.put(None)
        if self._thread is not None:
            self._thread.join()

    def _run(self) -> None:
        while (entry := self._steps.get()) is not None and not self.is_closed:
            step, pending = entry
            try:
                output = pending.wait()
                if not self.is_closed:
                    self._hand_on(step, output)
            except Exception as error:  # the thread's edge: the compute thread ends the session
                with self._changed:
                    self._failure = StepFailed(step.step_id, error)
                    self._changed.notify_all()
                self._on_failure()
                return
            with self._changed:
                self._num_waiting -= 1
                self._changed.notify_all()
