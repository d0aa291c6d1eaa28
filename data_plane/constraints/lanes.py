"""The threads on which constraints are followed. What is quick never waits behind what is slow.

There are four lanes: for grammars that were quick so far, for new ones, for new ones beyond `NEW_SHARE`, and for slow
ones. Each has a few threads of its own priority. A thread whose task took more CPU time than `SLOW_S` gets the lowest
priority, and another thread takes its place. So one grammar takes the cores from forward passes for `SLOW_S` at most,
and all new ones together for `NEW_SHARE` of the time; beyond that they get what forward passes leave. Vocabularies are
read on one further thread, in order.
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

from data_plane.constraints.patience import Allowance
from data_plane.constraints.priorities import cpu_s, lower
from kernels.native import add_humble_threads

_T = TypeVar("_T")

# A grammar of which one mask took more CPU time is slow. Usual ones take 0.05 to 1 ms with 128,000 tokens. Not time on
# the clock: on a machine whose cores are all busy, a thread may wait for longer than that.
SLOW_S = 0.005
# Niceness of threads above that of the process: for grammars that nothing is known of, and for slow ones.
NEW_NICENESS = 10
SLOW_NICENESS = 19
# CPU time that grammars which nothing is known of may take with NEW_NICENESS: as a share of the time, and how much of
# it may be saved up, which a few usual schemas take. Beyond it they have the lowest priority, too. A client can send
# grammars that are new each time: without a bound, each takes SLOW_S from the forward passes.
NEW_SHARE = 0.01
NEW_MOST_S = 0.03


class Lanes:
    """Threads come with the first task."""

    def __init__(self, num_threads: int | None = None) -> None:
        """`num_threads`: how many tasks of a lane run at once; None: half of the cores, at most four."""
        self.num_threads = num_threads or max(1, min(4, (os.cpu_count() or 2) // 2))
        self._quick = _Lane(self.num_threads, 0)
        self._new = _Lane(self.num_threads, NEW_NICENESS, self._spend)
        self._later = _Lane(self.num_threads, SLOW_NICENESS)  # new ones beyond their share: never behind slow ones
        self._slow = _Lane(self.num_threads, SLOW_NICENESS)
        self._share = Allowance(NEW_MOST_S, NEW_SHARE, self.now_s())
        self._sharing = threading.Lock()
        self._readers: ThreadPoolExecutor | None = None
        self._starting = threading.Lock()
        self._changed = threading.Condition()

    def read(self, task: Callable[[], _T]) -> Future[_T]:
        """Run a task after those that were given before."""
        with self._starting:
            if self._readers is None:
                self._readers = ThreadPoolExecutor(1, thread_name_prefix="vocabularies")
            return self._readers.submit(task)

    def run_quick(self, task: Callable[[], None]) -> None:
        """Run a task of a grammar that was quick so far."""
        self._quick.run(task)

    def run_new(self, task: Callable[[], None]) -> None:
        """Run a task of a grammar that nothing is known of."""
        with self._sharing:
            has_share = self._share.left_s(self.now_s()) > 0
        (self._new if has_share else self._later).run(task)

    def run_slow(self, task: Callable[[], None]) -> None:
        """Run a task of a slow grammar."""
        self._slow.run(task)

    def begin(self, further_threads: list[int]) -> None:
        """Count the CPU time of this thread's task from 0. `further_threads`: ids of those that work for it."""
        thread = _thread()
        if thread is not None:
            thread.begin(further_threads)

    def cpu_s(self) -> float:
        """CPU time since `begin`, seconds, with that of the further threads."""
        thread = _thread()
        return 0.0 if thread is None else thread.taken_s()

    def has_low_priority(self) -> bool:
        """Whether this thread's task took so long that another thread does what is left to do in its lane."""
        thread = _thread()
        return thread is not None and thread.is_demoted

    def now_s(self) -> float:
        """The time, seconds from any beginning."""
        return time.perf_counter()

    def _spend(self, taken_s: float) -> None:
        """Count CPU time of new grammars that others lacked."""
        with self._sharing:
            self._share.spend(taken_s)

    def notify(self) -> None:
        """Let `wait` look at its condition again."""
        with self._changed:
            self._changed.notify_all()

    def wait(self, condition: Callable[[], bool], timeout_s: float) -> bool:
        """Wait until the condition holds, which a task brings about that notifies; whether it holds."""
        with self._changed:
            return self._changed.wait_for(condition, timeout_s)


class _Thread:
    """A thread of a lane. Written under the lane's lock, or by its own tasks."""

    def __init__(self, niceness: int) -> None:
        self._niceness = niceness
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="constraints", initializer=self._start)
        # Ids of the threads of its task, their CPU time when `begin` was called, and what the task took before that.
        self._task: tuple[list[int], float, float] | None = None
        self.is_busy = False
        self.is_demoted = False

    def submit(self, task: Callable[[], None]) -> None:
        self._executor.submit(task)

    def end(self) -> None:
        """End after what was submitted."""
        self._executor.shutdown(wait=False)

    def begin(self, further_threads: list[int]) -> None:
        ids = [threading.get_native_id(), *further_threads]
        self._task = ids, sum(map(cpu_s, ids)), self.task_s()

    def taken_s(self) -> float:
        """CPU time since `begin`; 0 before it."""
        task = self._task
        if task is None:
            return 0.0
        ids, began_s, _ = task
        return max(sum(map(cpu_s, ids)) - began_s, 0.0)

    def task_s(self) -> float:
        """CPU time of the whole task since its first `begin`."""
        task = self._task
        return 0.0 if task is None else task[2] + self.taken_s()

    def end_task(self) -> None:
        self._task = None

    def demote(self) -> None:
        self.is_demoted = True
        for thread_id in self._task[0] if self._task else ():
            lower(thread_id, SLOW_NICENESS)

    def _start(self) -> None:
        _of_thread.found = self
        if self._niceness:
            lower(threading.get_native_id(), self._niceness)


_of_thread = threading.local()


def _thread() -> _Thread | None:
    """That of the caller; None outside of lanes."""
    found: _Thread | None = getattr(_of_thread, "found", None)
    return found


class _Lane:
    """Tasks begin in the order in which they are given."""

    def __init__(self, num_threads: int, niceness: int, spend: Callable[[float], None] | None = None) -> None:
        """`spend` gets the CPU time of each task, seconds, that it took before its thread was demoted."""
        self._spend = spend
        self._num_threads = num_threads  # those that were demoted not counted
        self._niceness = niceness
        self._lock = threading.Lock()
        self._tasks: deque[Callable[[], None]] = deque()
        self._threads: list[_Thread] = []  # those that were not demoted
        self._watcher: ThreadPoolExecutor | None = None
        self._is_watched = False
        self._never = threading.Event()  # to wait for a time

    def run(self, task: Callable[[], None]) -> None:
        with self._lock:
            self._tasks.append(task)
            self._employ()

    def _employ(self) -> None:
        """Let one more thread take tasks, if the lane may have one more. Called under the lock."""
        thread = next((each for each in self._threads if not each.is_busy), None)
        if thread is None:
            if len(self._threads) == self._num_threads:
                return
            thread = _Thread(self._niceness)
            self._threads.append(thread)
        thread.is_busy = True
        thread.submit(lambda: self._work(thread))
        if self._niceness < SLOW_NICENESS and not self._is_watched:
            self._watcher = self._watcher or ThreadPoolExecutor(1, thread_name_prefix="constraints-watch")
            self._is_watched = True
            self._watcher.submit(self._watch)

    def _work(self, thread: _Thread) -> None:
        is_humble = self._niceness > 0
        add_humble_threads(int(is_humble))
        try:
            while True:
                with self._lock:
                    if thread.is_demoted or not self._tasks:
                        thread.is_busy = False
                        return
                    task = self._tasks.popleft()
                task()
                with self._lock:
                    if self._spend is not None and not thread.is_demoted:
                        self._spend(thread.task_s())
                    thread.end_task()
        finally:
            add_humble_threads(-int(is_humble or thread.is_demoted))

    def _watch(self) -> None:
        """Demote threads whose tasks take long, while any has one."""
        while True:
            self._never.wait(SLOW_S)
            with self._lock:
                for thread in [each for each in self._threads if each.is_busy and each.taken_s() > SLOW_S]:
                    self._threads.remove(thread)
                    if self._spend is not None:
                        self._spend(thread.task_s())
                    thread.demote()
                    add_humble_threads(int(self._niceness == 0))
                    thread.end()
                    if self._tasks:
                        self._employ()
                if not any(each.is_busy for each in self._threads):
                    self._is_watched = False
                    return
