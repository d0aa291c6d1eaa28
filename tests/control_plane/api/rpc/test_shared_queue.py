"""Who waits for a place of a shared limit, and who does not."""

from __future__ import annotations

import asyncio
import random
from collections import Counter

from control_plane.api.rpc.shared_limit import SharedLimit
from control_plane.api.rpc.shared_queue import MAX_LOOKS, SharedQueue

A, B = ("a", "a", "1"), ("b", "b", "1")


class Rig:
    """A queue of `places`; `hold` makes a call that keeps its place until `end`."""

    def __init__(self, places: int) -> None:
        self.limit = SharedLimit(places, "things")
        self.queue = SharedQueue(self.limit)
        self.inside: list[asyncio.Task[None]] = []
        self.release: dict[asyncio.Task[None], asyncio.Event] = {}

    async def hold(self, holder: tuple[str, ...]) -> asyncio.Task[None]:
        """A call that has a place or waits for one."""
        release = asyncio.Event()

        async def run() -> None:
            async with self.queue.place(holder):
                task = asyncio.current_task()
                assert task is not None
                self.inside.append(task)
                try:
                    await release.wait()
                finally:
                    self.inside.remove(task)

        task = asyncio.create_task(run())
        self.release[task] = release
        await settle()
        return task

    async def end(self, task: asyncio.Task[None]) -> None:
        self.release[task].set()
        await task
        await settle()


async def settle() -> None:
    for _ in range(40):  # turns of the loop: one call that ends can let in several, one after the other
        await asyncio.sleep(0)


async def test_calls_of_one_holder_wait_and_keep_their_order() -> None:
    rig = Rig(2)
    first, second, third, fourth = [await rig.hold(A) for _ in range(4)]
    assert rig.inside == [first, second] and rig.queue.num_waiting == 2
    await rig.end(second)
    assert rig.inside == [first, third]
    await rig.end(first)
    assert rig.inside == [third, fourth] and rig.queue.num_waiting == 0
    for task in (third, fourth):
        await rig.end(task)
    assert rig.limit.num_held == 0


async def test_a_holder_below_its_equal_part_does_not_wait_for_slow_ones() -> None:
    rig = Rig(4)
    slow = [await rig.hold(A) for _ in range(10)]
    quick = [await rig.hold(B) for _ in range(3)]
    assert rig.inside == [*slow[:4], *quick[:2]]
    await rig.end(quick[0])
    assert rig.inside == [*slow[:4], quick[1], quick[2]], "its next call, and none of the slow ones"
    for task in (*quick[1:], *slow):
        await rig.end(task)
    assert rig.limit.num_held == 0


async def test_a_call_that_is_cancelled_while_it_waits_takes_no_place() -> None:
    rig = Rig(1)
    first, second, third = [await rig.hold(A) for _ in range(3)]
    second.cancel()
    rig.release[first].set()
    await settle()
    assert rig.inside == [third]
    await rig.end(third)
    assert rig.limit.num_held == rig.queue.num_waiting == 0


async def test_a_call_that_is_cancelled_when_its_place_comes_gives_the_place_on() -> None:
    rig = Rig(1)
    first, second, third = [await rig.hold(A) for _ in range(3)]
    rig.release[first].set()
    while first in rig.inside:
        await asyncio.sleep(0)
    second.cancel()  # it has the place, and did not run since
    await settle()
    assert second.cancelled() and rig.inside == [third]
    await rig.end(third)
    assert rig.limit.num_held == 0


async def test_each_of_many_holders_gets_its_turn() -> None:
    rig = Rig(1)
    holders = [("t", "t", str(number)) for number in range(5 * MAX_LOOKS)]
    tasks = [await rig.hold(holder) for holder in holders]
    for _ in tasks:
        await rig.end(rig.inside[0])
    assert all(task.done() for task in tasks) and rig.queue.num_waiting == 0


async def test_random_calls_never_hold_more_than_their_parts_and_none_is_forgotten() -> None:
    rng = random.Random(5)
    rig = Rig(6)
    holders = [(tenant, tenant, connection) for tenant in "abc" for connection in "12"]
    open_calls: list[asyncio.Task[None]] = []
    for _ in range(1500):
        what = rng.random()
        if what < 0.5 or not open_calls:
            open_calls.append(await rig.hold(rng.choice(holders)))
        else:
            task = open_calls.pop(rng.randrange(len(open_calls)))
            if what < 0.8:
                rig.release[task].set()
            else:
                task.cancel()
            await settle()
        assert rig.limit.num_held == len(rig.inside)
        assert rig.limit.num_held >= min(6, len(rig.inside) + rig.queue.num_waiting), "places are free and calls wait"
    for task in open_calls:
        rig.release[task].set()
    await asyncio.gather(*open_calls, return_exceptions=True)
    assert Counter(task.done() for task in rig.release) == {True: len(rig.release)}
    assert rig.limit.num_held == rig.queue.num_waiting == 0
