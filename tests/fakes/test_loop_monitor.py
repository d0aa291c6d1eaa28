"""What holds up the event loop is found, and what lets it go on is not."""

from __future__ import annotations

import asyncio
import time
from itertools import repeat

import pytest

from tests.fakes.loop_monitor import Clocks, LoopMonitor


class StoppedClocks(Clocks):
    """They stand still until the test moves them. One thread computes at a time."""

    def __init__(self) -> None:
        self.cpu_s = self.delay_s = 0.0

    def thread_s(self) -> float:
        return self.cpu_s

    def process_s(self) -> float:
        return self.cpu_s

    def run_delay_s(self) -> float:
        return self.delay_s


@pytest.fixture
def clocks() -> StoppedClocks:
    return StoppedClocks()


def test_a_long_turn_of_a_loop_is_found() -> None:
    """With the clocks of the machine."""

    async def long_turn() -> float:
        began_s = time.thread_time()
        sum(repeat(1, 2_000_000))
        return (time.thread_time() - began_s) * 1e3

    monitor = LoopMonitor()
    with asyncio.Runner(loop_factory=monitor.new_event_loop) as runner:
        taken_ms = runner.run(long_turn())
        report = monitor.report()
    assert report.longest_turn_ms >= round(taken_ms, 1)
    assert "long_turn" in report.slowest[0][1]


@pytest.mark.parametrize("first", ["the loop", "the thread that requests it"])
def test_a_thread_that_keeps_the_lock_is_found_whoever_gets_it_next(clocks: StoppedClocks, first: str) -> None:
    monitor = LoopMonitor(clocks)
    monitor.turn_begins()
    monitor.turn_ends()
    clocks.cpu_s += 0.3
    if first != "the loop":
        monitor.lock_is_free(0.0)
    monitor.turn_begins()
    report = monitor.report()
    assert (report.longest_lock_ms, report.longest_turn_ms) == (300.0, 0.0)


def test_many_short_turns_do_not_keep_the_lock(clocks: StoppedClocks) -> None:
    """Another thread may get no lock between them; the loop goes on all the same."""
    monitor = LoopMonitor(clocks)
    for _ in range(100):
        monitor.turn_begins()
        clocks.cpu_s += 0.003
        monitor.turn_ends()
    monitor.lock_is_free(0.0)
    report = monitor.report()
    assert (report.longest_lock_ms, report.longest_turn_ms) == (3.0, 3.0)


def test_a_thread_that_gets_the_lock_within_a_turn_and_keeps_it_is_found() -> None:
    """The loop's own thread computes nothing meanwhile."""

    class OtherThread(StoppedClocks):
        def thread_s(self) -> float:
            return 0.0

    clocks = OtherThread()
    monitor = LoopMonitor(clocks)
    monitor.turn_begins()
    clocks.cpu_s += 0.3
    monitor.turn_ends()
    monitor.lock_is_free(0.0)
    report = monitor.report()
    assert (report.longest_lock_ms, report.longest_turn_ms) == (300.0, 0.0)


def test_a_thread_that_looks_late_does_not_take_the_turns_since_then_for_one() -> None:
    class LateClocks(StoppedClocks):
        """The loop makes turns between the reading and what follows it."""

        is_late = False

        def process_s(self) -> float:
            now_s = self.cpu_s
            if self.is_late:
                self.is_late = False
                for _ in range(100):
                    monitor.turn_begins()
                    self.cpu_s += 0.003
                    monitor.turn_ends()
            return now_s

    late = LateClocks()
    monitor = LoopMonitor(late)
    late.is_late = True
    monitor.lock_is_free(0.0)
    monitor.lock_is_free(0.0)
    assert monitor.report().longest_lock_ms == 3.0


def test_the_time_without_a_processor_does_not_count(clocks: StoppedClocks) -> None:
    monitor = LoopMonitor(clocks)
    monitor.turn_ends()
    clocks.cpu_s += 0.3
    clocks.delay_s += 0.2
    monitor.turn_begins()
    assert monitor.report().longest_lock_ms == 100.0
    clocks.cpu_s += 0.3
    monitor.lock_is_free(0.1)
    assert monitor.report().longest_lock_ms == 200.0
