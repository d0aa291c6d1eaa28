"""Places for texts go round between tenants, and what waits for one is bounded."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from control_plane.api.text.fair_gate import FairGate, FairGateStats
from control_plane.errors import Exhausted


class Texts:
    """Texts that stay at the gate until the test lets them go; `entered` has them in the order of their turns."""

    def __init__(self, gate: FairGate) -> None:
        self.gate = gate
        self.entered: list[str] = []
        self.tasks: dict[str, asyncio.Task[None]] = {}
        self._done: dict[str, asyncio.Event] = {}

    def come(self, name: str, size_bytes: int = 1) -> asyncio.Task[None]:
        """`name` begins with its tenant: "a1" is tenant a's."""
        self._done[name] = asyncio.Event()
        self.tasks[name] = asyncio.create_task(self._stay(name, size_bytes))
        return self.tasks[name]

    async def _stay(self, name: str, size_bytes: int) -> None:
        async with self.gate.place(name[0], size_bytes):
            self.entered.append(name)
            await self._done[name].wait()

    async def leave(self, *names: str) -> None:
        for name in names:
            self._done[name].set()
            await self.tasks[name]
        await settled()


async def settled() -> None:
    """Everything that is due has happened."""
    for _ in range(100):
        await asyncio.sleep(0)


@asynccontextmanager
async def texts(num_places: int = 2, max_waiting_bytes: int = 100) -> AsyncIterator[Texts]:
    made = Texts(FairGate(num_places, max_waiting_bytes))
    try:
        yield made
    finally:
        for task in made.tasks.values():
            task.cancel()
        await asyncio.gather(*made.tasks.values(), return_exceptions=True)


async def test_no_tenant_has_all_places() -> None:
    async with texts() as at_gate:
        for number in range(5):
            at_gate.come(f"a{number}")
        await settled()
        assert at_gate.entered == ["a0"]
        at_gate.come("b0")
        await settled()
        assert at_gate.entered == ["a0", "b0"]


async def test_tenants_take_turns_whatever_each_has_waiting() -> None:
    async with texts() as at_gate:
        for name in ("a0", "b0", "a1", "a2", "a3", "b1", "c0", "c1"):
            at_gate.come(name)
        await settled()
        await at_gate.leave("a0", "b0", "a1", "b1", "c0", "a2", "c1", "a3")
        assert at_gate.entered == ["a0", "b0", "a1", "b1", "c0", "a2", "c1", "a3"]


async def test_more_than_may_wait_is_refused_with_a_time_to_come_back() -> None:
    async with texts(max_waiting_bytes=100) as at_gate:
        at_gate.come("a0", 1000)  # it need not wait
        at_gate.come("a1", 50)
        at_gate.come("a2", 1)
        await settled()
        with pytest.raises(Exhausted, match=r"texts of 50 bytes from tenant a wait.*adds 1; the limit is 100"):
            await at_gate.tasks["a2"]
        at_gate.come("b0", 1000)
        at_gate.come("b1", 25)  # half of what is free
        at_gate.come("c0", 12)
        await settled()
        assert [name for name, task in at_gate.tasks.items() if not task.done()] == ["a0", "a1", "b0", "b1", "c0"]
        assert at_gate.gate.num_waiting_bytes == 87
        await at_gate.leave("a0", "a1", "b0", "b1", "c0")
        assert at_gate.gate.num_waiting_bytes == 0


async def test_who_leaves_the_line_holds_nothing_up() -> None:
    async with texts() as at_gate:
        for name in ("a0", "a1", "a2", "b0", "b1"):
            at_gate.come(name)
        await settled()
        at_gate.tasks["a1"].cancel()
        at_gate.tasks["b1"].cancel()
        await settled()
        await at_gate.leave("a0", "b0")
        assert at_gate.entered == ["a0", "b0", "a2"]
        at_gate.come("b2")
        await settled()
        await at_gate.leave("a2", "b2")
        assert at_gate.gate.num_waiting_bytes == 0


async def test_who_is_cancelled_as_its_turn_comes_gives_its_place_back() -> None:
    async with texts() as at_gate:
        for name in ("a0", "a1", "a2"):
            at_gate.come(name)
        await settled()
        at_gate._done["a0"].set()
        await asyncio.sleep(0)  # a0 leaves, a1 has its turn and did not run yet
        at_gate.tasks["a1"].cancel()
        await settled()
        assert at_gate.entered == ["a0", "a2"]


async def test_random_comings_and_goings_leave_nothing_behind() -> None:
    rng = random.Random(3)
    async with texts(num_places=3, max_waiting_bytes=60) as at_gate:
        for number in range(400):
            at_gate.come(f"{rng.choice('abcd')}{number}", rng.randint(1, 9))
            if rng.random() < 0.7:
                name = rng.choice(list(at_gate.tasks))
                if rng.random() < 0.3:
                    at_gate.tasks[name].cancel()
                at_gate._done[name].set()
            await settled()
            inside = [name for name in at_gate.entered if not at_gate.tasks[name].done()]
            assert len(inside) <= 3 and all(sum(n[0] == tenant for n in inside) <= 2 for tenant in "abcd")
            waiting = [n for n, t in at_gate.tasks.items() if not t.done() and n not in at_gate.entered]
            assert len(inside) == 3 or len({name[0] for name in waiting}) <= 1, "a place is free, and others wait"
        for done in at_gate._done.values():
            done.set()
        await asyncio.gather(*at_gate.tasks.values(), return_exceptions=True)
        assert at_gate.gate.stats() == FairGateStats(0, 0, 0, 0)
