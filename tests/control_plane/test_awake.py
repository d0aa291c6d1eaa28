"""Time in which the process did not run is counted for nobody."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from control_plane.awake import MAX_GAP_S, AwakeClock, AwakeTimeout
from tests.fakes.fleet_rig import FakeClock


def test_time_between_readings_counts_unless_it_was_an_absence() -> None:
    clock = FakeClock()
    awake = AwakeClock(clock)
    start_s = awake()
    for _ in range(10):
        clock.advance(MAX_GAP_S / 2)
        awake()
    assert awake() - start_s == 5 * MAX_GAP_S
    clock.advance(3600)
    assert awake() - start_s == 5 * MAX_GAP_S
    clock.advance(0.25)
    assert awake() - start_s == 5 * MAX_GAP_S + 0.25


class Timers:
    """The loop's timers, which the test fires."""

    def __init__(self, clock: FakeClock) -> None:
        self.clock = clock
        self.delays_s: list[float] = []
        self._due: Callable[[], None] | None = None

    def call_later(self, delay_s: float, callback: Callable[[], None]) -> asyncio.TimerHandle:
        self.delays_s.append(delay_s)
        self._due = callback
        return asyncio.get_running_loop().call_later(3600, callback)  # to be cancelled

    def fire(self, late_s: float = 0.0) -> None:
        """Let the time of the timer come, and so much more."""
        self.clock.advance(self.delays_s[-1] + late_s)
        assert self._due is not None
        self._due()


async def held(timers: Timers, limit_s: float) -> asyncio.Task[None]:
    """A task that waits for ever within a limit."""
    awake = AwakeClock(timers.clock)

    async def wait() -> None:
        async with AwakeTimeout(limit_s, awake, timers.call_later):
            await asyncio.Event().wait()

    task = asyncio.create_task(wait())
    await asyncio.sleep(0)
    return task


async def test_a_limit_ends_what_takes_longer() -> None:
    timers = Timers(FakeClock())
    task = await held(timers, 1.2)
    for _ in range(3):
        assert not task.cancelling()
        timers.fire()
    assert sum(timers.delays_s) == pytest.approx(1.2)
    with pytest.raises(TimeoutError):
        await task


async def test_a_limit_does_not_count_the_time_in_which_the_process_was_stopped() -> None:
    timers = Timers(FakeClock())
    task = await held(timers, 0.4)
    timers.fire(late_s=10.0)
    assert not task.cancelling()
    timers.fire()
    with pytest.raises(TimeoutError):
        await task


async def test_within_the_limit_nothing_happens_and_a_cancel_of_others_stays_one() -> None:
    async with AwakeTimeout(30, AwakeClock()):
        await asyncio.sleep(0)
    timers = Timers(FakeClock())
    task = await held(timers, 1.0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
