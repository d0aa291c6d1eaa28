"""Lanes for tests: some that know when all is done, and some whose tasks end when a seeded draw says so."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from data_plane.constraints.lanes import Lanes
from data_plane.constraints.masks import Masks
from data_plane.constraints.rows import ConstraintRows

_T = TypeVar("_T")


class CountingLanes(Lanes):
    """Lanes that know when nothing is left to do."""

    def __init__(self) -> None:
        super().__init__(1)
        self._num_left = 0
        self._counting = threading.Lock()

    def read(self, task: Callable[[], _T]) -> Future[_T]:
        return super().read(self._counted(task))

    def run_quick(self, task: Callable[[], None]) -> None:
        super().run_quick(self._counted(task))

    def run_new(self, task: Callable[[], None]) -> None:
        super().run_new(self._counted(task))

    def run_slow(self, task: Callable[[], None]) -> None:
        super().run_slow(self._counted(task))

    def finish(self) -> None:
        """Wait until every task is done, and those that it gave."""
        assert self.wait(lambda: self._num_left == 0, 60.0), "a constraint is not followed within a minute"

    def _counted(self, task: Callable[[], _T]) -> Callable[[], _T]:
        def run() -> _T:
            try:
                return task()
            finally:
                self._count(-1)
                self.notify()

        self._count(1)
        return run

    def _count(self, more: int) -> None:
        with self._counting:
            self._num_left += more


class DrawnLanes(Lanes):
    """No threads and no time: whenever a task is given or awaited, a draw for each one decides which of them run."""

    def __init__(self, seed: int, chance: float, *, is_slow: bool) -> None:
        """`is_slow`: whether every grammar is found to be slow with its first token."""
        super().__init__(1)
        self._draw = random.Random(seed)
        self._chance = chance
        self._tasks: list[Callable[[], object]] = []
        self._task_s = 1.0 if is_slow else 0.0

    def read(self, task: Callable[[], _T]) -> Future[_T]:
        future: Future[_T] = Future()
        future.set_result(task())
        return future

    def run_quick(self, task: Callable[[], None]) -> None:
        self._give(task)

    def run_new(self, task: Callable[[], None]) -> None:
        self._give(task)

    def run_slow(self, task: Callable[[], None]) -> None:
        self._give(task)

    def now_s(self) -> float:
        return 0.0

    def notify(self) -> None:
        """Nobody waits."""

    def cpu_s(self) -> float:
        return self._task_s

    def wait(self, condition: Callable[[], bool], timeout_s: float) -> bool:
        self._run_some()
        return condition()

    def _give(self, task: Callable[[], None]) -> None:
        self._tasks.append(task)
        self._run_some()

    def _run_some(self) -> None:
        tasks, self._tasks = self._tasks, []
        for task in tasks:
            if self._draw.random() < self._chance:
                task()
            else:
                self._tasks.append(task)


def in_time() -> DrawnLanes:
    """Lanes whose masks are never late."""
    return DrawnLanes(0, 1.0, is_slow=False)


class PatientRows(ConstraintRows):
    """Rows whose masks are all ready when they are collected, however long they take."""

    def __init__(self, num_tokens: int) -> None:
        self._counting_lanes = CountingLanes()
        super().__init__(num_tokens, lanes=self._counting_lanes)

    def collect(self, rows: npt.NDArray[np.int64], *, is_alone: bool, is_verifying: bool = False) -> Masks | None:
        self._counting_lanes.finish()
        return super().collect(rows, is_alone=is_alone, is_verifying=is_verifying)


def masks_of(rows: PatientRows, numbers: list[int]) -> Masks:
    """The masks of these rows, of which at least one has a constraint."""
    masks = rows.collect(np.array(numbers, dtype=np.int64), is_alone=False)
    assert masks is not None and not masks.waiting
    return masks
