"""Tenants take turns; a cancelled call leaves no turn behind."""

from __future__ import annotations

import asyncio
import contextlib

import pytest

from control_plane.constraints.turns import Turns
from control_plane.errors import QueueFull


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


class Calls:
    """Calls that hold their turn until they are let go."""

    def __init__(self, turns: Turns) -> None:
        self.turns = turns
        self.began: list[str] = []
        self.may_end = asyncio.Semaphore(0)

    def begin(self, tenant: str) -> asyncio.Task[None]:
        return asyncio.create_task(self._call(tenant))

    async def _call(self, tenant: str) -> None:
        async with self.turns.turn(tenant):
            self.began.append(tenant)
            await self.may_end.acquire()


async def test_a_tenant_waits_for_one_turn_of_each_other_tenant() -> None:
    calls = Calls(Turns(10))
    tasks = [calls.begin(tenant) for tenant in "aaaabab"]
    await settle()
    assert calls.began == ["a"]
    for _ in tasks:
        calls.may_end.release()
    await asyncio.gather(*tasks)
    assert "".join(calls.began) == "aababaa"


async def test_a_tenant_with_too_many_waiting_calls_is_refused_alone() -> None:
    calls = Calls(Turns(2))
    tasks = [calls.begin("a") for _ in range(3)]
    await settle()
    with pytest.raises(QueueFull, match="2 requests of the tenant"):
        await calls.begin("a")
    tasks.append(calls.begin("b"))
    for _ in tasks:
        calls.may_end.release()
    await asyncio.gather(*tasks)
    assert calls.began.count("b") == 1 and calls.turns.num_waiting("a") == 0


@pytest.mark.parametrize("is_turn_there", [False, True])
async def test_a_cancelled_call_gives_its_turn_to_the_next_one(is_turn_there: bool) -> None:
    calls = Calls(Turns(10))
    first, second, third = (calls.begin("a") for _ in range(3))
    await settle()
    if is_turn_there:  # the turn is passed on first, and its new holder is cancelled before it runs
        first.cancel()
        await asyncio.sleep(0)
        second.cancel()
    else:
        second.cancel()
        first.cancel()
    await settle()
    assert calls.began == ["a", "a"] and not third.done()
    calls.may_end.release()
    await third
    with contextlib.suppress(asyncio.CancelledError):
        await second
    assert calls.turns.num_waiting("a") == 0
    calls.may_end.release()
    await calls.begin("b")


async def test_calls_cancelled_in_every_order_leave_the_lock_free() -> None:
    for victim in range(4):
        calls = Calls(Turns(10))
        tasks = [calls.begin(tenant) for tenant in "abab"]
        await settle()
        calls.may_end.release()
        tasks[victim].cancel()
        for _ in tasks:
            calls.may_end.release()
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.wait_for(calls.begin("c"), 5)
