"""Full collections of garbage: when, and what they leave behind."""

from __future__ import annotations

import asyncio
import contextlib
import gc

from control_plane.setup.garbage import MAX_PART, MIN_INTERVAL_S, FullCollections, collect_rarely


class Time:
    """A clock, and a collection that takes so long."""

    def __init__(self) -> None:
        self.now_s = 100.0
        self.takes_s = 0.0

    def __call__(self) -> float:
        return self.now_s

    def collect(self) -> None:
        self.now_s += self.takes_s


def test_a_long_collection_is_followed_by_a_longer_rest() -> None:
    time = Time()
    due = FullCollections(clock=time, collect=time.collect)
    assert due.due_in_s == MIN_INTERVAL_S
    time.now_s += MIN_INTERVAL_S
    time.takes_s = 0.4
    assert due.due_in_s == 0
    due.collect()
    assert round(due.due_in_s, 6) == round(0.4 / MAX_PART, 6) == 80.0
    time.now_s += 80.0
    time.takes_s = 0.001
    due.collect()
    assert round(due.due_in_s, 6) == MIN_INTERVAL_S, "a short one is due again after the shortest time"


async def test_only_due_collections_are_full_and_pythons_own_come_back_afterwards() -> None:
    before = gc.get_threshold()
    found = asyncio.Event()

    class AlwaysDue(FullCollections):
        due_in_s = 0.0

    num_collected = 0

    def collect() -> None:
        nonlocal num_collected
        num_collected += 1
        if num_collected == 3:
            found.set()

    task = asyncio.create_task(collect_rarely(AlwaysDue(collect=collect)))
    try:
        async with asyncio.timeout(30):
            await found.wait()
        assert gc.get_threshold()[:2] == before[:2], "young objects are collected as before"
        assert gc.get_threshold()[2] > 1_000_000
        assert gc.get_freeze_count() > 0
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
        gc.unfreeze()
    assert gc.get_threshold() == before
