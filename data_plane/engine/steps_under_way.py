"""Steps that were submitted, and whose results may still be on the device."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import numpy as np

from data_plane.engine.rows import Int64Array, Rows
from data_plane.engine.sampling.results import ResultCopy
from data_plane.plan import StepOutput


class StepUnderWay:
    """A step whose rows each get a token, and nothing else (data_plane.plan.PendingStep)."""

    def __init__(
        self,
        step_id: int,
        sampled: Int64Array,
        copy: ResultCopy,
        *,
        moved: tuple[int, int],
        started_s: float,
        previous: StepUnderWay | None,
        clock: Callable[[], float],
    ) -> None:
        """`previous` is the step submitted before, if it may be under way; `moved` is for the output (StepOutput)."""
        self.sampled = sampled
        self.copy = copy
        self._began_s: float | None = None  # None before `wait`
        self._step_id = step_id
        self._moved = moved
        self._started_s = started_s
        self._ended_s = started_s
        self._previous = previous
        self._clock = clock

    def is_done(self) -> bool:
        """Whether `wait` returns at once."""
        return self.copy.is_done()

    def time_since(self, decided_s: float) -> float | None:
        """What it took, in s, of the time behind this moment. None before `wait`."""
        began_s = self._began_s
        return None if began_s is None else self._ended_s - max(began_s, decided_s)

    def wait(self) -> StepOutput:
        """The results. To be called once, in the order of the steps. The time begins where the step before ended."""
        tokens, finite = self.copy.read()
        self._ended_s = self._clock()
        began_s = self._started_s
        if self._previous is not None:
            began_s = max(began_s, self._previous._ended_s)
            self._previous = None
        self._began_s = began_s
        rows = self.sampled.astype(np.int32)
        return StepOutput(
            self._step_id,
            rows[finite],
            tokens[finite],
            rows[~finite],
            int((self._ended_s - began_s) * 1e6),
            num_moved_blocks=self._moved[0],
            move_time_us=self._moved[1],
        )


class StepsUnderWay:
    """The steps of an engine whose results its rows do not know yet. Belongs to the compute thread."""

    def __init__(self, rows: Rows, clock: Callable[[], float]) -> None:
        self._rows = rows
        self._clock = clock
        self._steps: deque[tuple[int, StepUnderWay]] = deque()  # with the number of the step for the rows
        self._last: StepUnderWay | None = None

    def begin(
        self, step_id: int, sampled: Int64Array, copy: ResultCopy, *, moved: tuple[int, int], started_s: float
    ) -> StepUnderWay:
        """A step in which these rows sampled a token each. The copy brings their tokens."""
        step = StepUnderWay(
            step_id, sampled, copy, moved=moved, started_s=started_s, previous=self._last, clock=self._clock
        )
        self._steps.append((self._rows.note_sampled(sampled), step))
        self._last = step
        return step

    def settle(self) -> None:
        """Give the rows the results that have come. Does not wait."""
        while self._steps and self._steps[0][1].is_done():
            number, step = self._steps.popleft()
            self._rows.note_results(number, step.sampled, step.copy.read()[1])

    def clear(self) -> None:
        """Forget the steps. The device has ended them."""
        self._steps.clear()
        self._last = None
