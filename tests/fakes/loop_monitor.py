"""Measures how long an event loop is held up at a time.

Counts CPU time, so that a busy machine does not matter. Two measures: the time of the loop's own thread in one turn,
from one look at the selector to the next; and the time of all threads while none but one had the interpreter's lock,
since a call in any thread that does not release it stops the loop just as well. The second is the time between two
moments at which the lock is known to have been free: a turn of the loop begins or ends, or a thread gets the lock that
requests it all the time. (That thread alone says too little: it gets none while the loop makes many short turns.) The
time in which the kernel left the thread waiting that requests the lock does not count.
"""

from __future__ import annotations

import asyncio
import heapq
import selectors
import threading
import time
from collections.abc import Callable
from contextvars import Context
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVarTuple

if TYPE_CHECKING:
    from _typeshed import FileDescriptorLike

_Ts = TypeVarTuple("_Ts")

NUM_SLOWEST = 5
PROBE_S = 0.002  # between two looks of the thread that takes the lock
_SCHEDSTAT = Path("/proc/thread-self/schedstat")


@dataclass(frozen=True)
class LoopReport:
    """What was found since the monitor was made or reset, in milliseconds of CPU time."""

    longest_turn_ms: float
    longest_lock_ms: float  # in which one thread kept the interpreter's lock
    slowest: list[tuple[float, str]]  # callbacks of the loop, the slowest first


class Clocks:
    """CPU times, in seconds."""

    def thread_s(self) -> float:
        """That of the calling thread."""
        return time.thread_time()

    def process_s(self) -> float:
        """That of all threads."""
        return time.process_time()

    def run_delay_s(self) -> float:
        """How long the calling thread was ready to run and another one had its processor (proc(5), schedstat)."""
        return int(_SCHEDSTAT.read_text(encoding="ascii").split()[1]) * 1e-9


class LoopMonitor:
    """Watches the event loop that it makes. One monitor in a process."""

    def __init__(self, clocks: Clocks | None = None) -> None:
        self._clocks = clocks or Clocks()
        self._turn_began_s: float | None = None  # CPU time of the loop's thread; None: it looks at the selector
        self._longest_turn_s = self._longest_lock_s = 0.0
        self._was_free_s = self._clocks.process_s()  # CPU time of all threads when the lock was last known to be free
        self._loop_delay_s = 0.0  # run delay of the loop's thread when a turn began or ended
        self._slowest: list[tuple[float, str]] = []  # a heap, the least slow first
        self._is_resetting = False

    def new_event_loop(self) -> asyncio.AbstractEventLoop:
        """A loop of the standard library."""
        loop = _WatchedLoop(self)
        threading.Thread(target=self._probe_lock, args=(loop,), name="probe", daemon=True).start()
        return loop

    def reset(self) -> None:
        """Forget what was measured so far, of the present turn too. Called by a callback of the loop."""
        self._longest_turn_s = self._longest_lock_s = 0.0
        self._slowest.clear()
        self._turn_began_s = None
        self._is_resetting = True

    def report(self) -> LoopReport:
        """The measurements so far."""
        slowest = [(_ms(seconds), name) for seconds, name in sorted(self._slowest, reverse=True)]
        return LoopReport(_ms(self._longest_turn_s), _ms(self._longest_lock_s), slowest)

    # ---- for the loop ----

    def turn_begins(self) -> None:
        self._turn_began_s = self._clocks.thread_s()
        self._loop_has_lock()

    def turn_ends(self) -> None:
        if self._turn_began_s is not None:
            self._longest_turn_s = max(self._longest_turn_s, self._clocks.thread_s() - self._turn_began_s)
        self._loop_has_lock()

    def _loop_has_lock(self) -> None:
        delay_s = self._clocks.run_delay_s()
        self.lock_is_free(delay_s - self._loop_delay_s)
        self._loop_delay_s = delay_s

    def callback_ended(self, callback: Callable[..., object], seconds: float) -> None:
        if self._is_resetting:
            self._is_resetting = False  # the callback that reset the monitor
        elif len(self._slowest) < NUM_SLOWEST:
            heapq.heappush(self._slowest, (seconds, _name(callback)))
        elif seconds > self._slowest[0][0]:
            heapq.heapreplace(self._slowest, (seconds, _name(callback)))

    def lock_is_free(self, delay_s: float) -> None:
        """The calling thread, which requested the lock, has it. `delay_s`: how long the kernel left it waiting."""
        now_s = self._clocks.process_s()
        self._longest_lock_s = max(self._longest_lock_s, now_s - self._was_free_s - delay_s)
        self._was_free_s = max(self._was_free_s, now_s)  # another thread may have had it since then

    def _probe_lock(self, loop: asyncio.AbstractEventLoop) -> None:
        pause, before_delay_s = threading.Event(), self._clocks.run_delay_s()
        while not loop.is_closed():
            pause.wait(PROBE_S)
            delay_s = self._clocks.run_delay_s()
            self.lock_is_free(delay_s - before_delay_s)
            before_delay_s = delay_s


class _WatchedLoop(asyncio.SelectorEventLoop):
    """Times every callback but those of asyncio's own transports, which count in their turn only."""

    def __init__(self, monitor: LoopMonitor) -> None:
        super().__init__(_watched_selector(monitor))
        self._monitor = monitor

    def call_soon(
        self, callback: Callable[[*_Ts], object], *args: *_Ts, context: Context | None = None
    ) -> asyncio.Handle:
        return super().call_soon(self._timed, callback, *args, context=context)

    def call_soon_threadsafe(
        self, callback: Callable[[*_Ts], object], *args: *_Ts, context: Context | None = None
    ) -> asyncio.Handle:
        return super().call_soon_threadsafe(self._timed, callback, *args, context=context)

    def call_at(
        self, when: float, callback: Callable[[*_Ts], object], *args: *_Ts, context: Context | None = None
    ) -> asyncio.TimerHandle:
        return super().call_at(when, self._timed, callback, *args, context=context)

    def add_reader(self, fd: FileDescriptorLike, callback: Callable[[*_Ts], object], *args: *_Ts) -> None:
        super().add_reader(fd, self._timed, callback, *args)

    def add_writer(self, fd: FileDescriptorLike, callback: Callable[[*_Ts], object], *args: *_Ts) -> None:
        super().add_writer(fd, self._timed, callback, *args)

    def _timed(self, callback: Callable[[*_Ts], object], *args: *_Ts) -> None:
        began_s = time.thread_time()
        try:
            callback(*args)
        finally:
            self._monitor.callback_ended(callback, time.thread_time() - began_s)


def _watched_selector(monitor: LoopMonitor) -> selectors.BaseSelector:
    class WatchedSelector(selectors.DefaultSelector):
        def select(self, timeout: float | None = None) -> Any:
            monitor.turn_ends()
            ready = super().select(timeout)
            monitor.turn_begins()
            return ready

    return WatchedSelector()


def _name(callback: Callable[..., object]) -> str:
    # Not the repr of a task, which has that of its result: it takes longer than the callback where that is large.
    task = getattr(callback, "__self__", None)
    if isinstance(task, asyncio.Task):
        return f"{task.get_name()} {getattr(task.get_coro(), '__qualname__', '')}"
    return str(getattr(callback, "__qualname__", callback))


def _ms(seconds: float) -> float:
    return round(seconds * 1000, 1)
