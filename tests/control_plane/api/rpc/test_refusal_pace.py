"""How long refused callers wait for their refusal."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import grpc
import grpc.aio
import pytest

from control_plane.api.rpc import listeners
from control_plane.api.rpc.refusal_pace import BURST, DELAY_SPREAD, MAX_DELAY_S, REFUSALS_PER_S, RefusalPace
from control_plane.caller import Caller
from control_plane.errors import Exhausted, Unauthenticated

PEER, OTHER = "ipv4:10.0.0.7:5001", "ipv4:10.0.0.8:5001"


class Rig:
    """A pace whose clock and sleep are the test's."""

    def __init__(self, *, max_held: int = 10_000, max_hosts: int = 10) -> None:
        self.now_s = 1000.0
        self.slept_s: list[float] = []
        self.wake = asyncio.Event()
        self.pace = RefusalPace(clock=lambda: self.now_s, sleep=self._sleep, max_held=max_held, max_hosts=max_hosts)

    async def _sleep(self, delay_s: float) -> None:
        self.slept_s.append(delay_s)
        await self.wake.wait()

    async def refuse(self, peer: str, count: int) -> list[asyncio.Task[None]]:
        """So many refusals at once; those that wait."""
        tasks = [asyncio.create_task(self.pace.wait(peer)) for _ in range(count)]
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        return [task for task in tasks if not task.done()]

    async def end(self, waiting: list[asyncio.Task[None]]) -> None:
        self.wake.set()
        await asyncio.gather(*waiting)
        assert self.pace.num_held == 0


async def test_a_burst_is_refused_at_once_and_what_follows_at_the_rate() -> None:
    rig = Rig()
    waiting = await rig.refuse(PEER, BURST + 3)
    assert len(waiting) == rig.pace.num_held == 3
    assert rig.slept_s == pytest.approx([number / REFUSALS_PER_S for number in (1, 2, 3)])
    await rig.end(waiting)


async def test_other_connections_of_a_host_share_its_rate_and_other_hosts_do_not() -> None:
    rig = Rig()
    assert await rig.refuse(PEER, BURST) == []
    assert await rig.refuse(OTHER, BURST) == []
    waiting = await rig.refuse("ipv4:10.0.0.7:6002", 1)
    assert len(waiting) == 1
    await rig.end(waiting)


async def test_a_host_that_was_quiet_has_its_burst_again_and_is_forgotten() -> None:
    rig = Rig()
    await rig.end(await rig.refuse(PEER, BURST + 500))
    rig.now_s += (BURST + 500) / REFUSALS_PER_S + MAX_DELAY_S
    assert await rig.refuse(OTHER, 1) == []
    assert rig.pace.num_hosts == 1
    assert await rig.refuse(PEER, BURST) == []


async def test_the_longest_delays_differ_so_that_calls_do_not_come_back_together() -> None:
    rig = Rig()
    ranked = round(MAX_DELAY_S * REFUSALS_PER_S)
    waiting = await rig.refuse(PEER, BURST + ranked + 1000)
    assert max(rig.slept_s) <= MAX_DELAY_S
    beyond = rig.slept_s[-900:]
    assert min(beyond) >= MAX_DELAY_S / DELAY_SPREAD and len(set(beyond)) == 900
    await rig.end(waiting)
    rig.now_s += MAX_DELAY_S + BURST / REFUSALS_PER_S
    assert await rig.refuse(PEER, BURST) == [], "what came beyond the longest delay is forgotten"


async def test_refusals_that_wait_are_bounded_and_hosts_have_equal_parts() -> None:
    rig = Rig(max_held=10)
    waiting = await rig.refuse(PEER, BURST + 50)
    assert len(waiting) == 10, "the others end at once"
    waiting += await rig.refuse(OTHER, BURST + 50)
    assert len(waiting) == 15
    await rig.end(waiting)


async def test_a_client_that_leaves_gives_its_place_back() -> None:
    rig = Rig()
    waiting = await rig.refuse(PEER, BURST + 5)
    for task in waiting:
        task.cancel()
    await asyncio.gather(*waiting, return_exceptions=True)
    assert rig.pace.num_held == 0


async def test_more_hosts_than_are_counted_apart_share_one_count() -> None:
    rig = Rig(max_hosts=2)
    for number in range(BURST + 2):
        assert await rig.refuse(f"ipv4:10.0.{number // 250}.{number % 250}:1", 1) == []
    assert rig.pace.num_hosts == 3
    waiting = await rig.refuse("ipv4:10.9.9.9:1", 1)
    assert len(waiting) == 1
    await rig.end(waiting)


def caller_of(_method: str, context: Any) -> Caller:
    """Only what names itself has a caller."""
    if ("known", "1") not in list(context.invocation_metadata()):
        raise Unauthenticated("this server needs a credential")
    return Caller()


async def _serve(request: bytes, _context: Any) -> bytes:
    if request == b"too much":
        raise Exhausted("at most nothing at once", retry_after_s=1.0)
    return request


@contextlib.asynccontextmanager
async def served(pace: RefusalPace) -> AsyncIterator[Any]:
    """A call to a port with this pace."""
    server = listeners.client_server(
        max_concurrent_rpcs=10,
        max_connections=10,
        max_streams_per_connection=1000,
        write_timeout_s=30.0,
        identify=caller_of,
        pace=pace,
    )
    methods = {"Act": grpc.unary_unary_rpc_method_handler(_serve)}
    server.add_registered_method_handlers("t.T", methods)
    address = listeners.bind(server, "127.0.0.1:0")
    await server.start()
    try:
        channel: Any
        async with grpc.aio.insecure_channel(address) as channel:
            yield channel.unary_unary("/t.T/Act")
    finally:
        await server.stop(None)


async def test_a_flood_of_bad_keys_waits_and_delays_no_valid_call() -> None:
    wake, waits = asyncio.Event(), asyncio.Semaphore(0)

    async def sleep(_: float) -> None:
        waits.release()
        await wake.wait()

    pace = RefusalPace(clock=lambda: 1000.0, sleep=sleep)
    async with served(pace) as act, asyncio.timeout(60):
        codes = [asyncio.ensure_future(call.code()) for call in [act(b"") for _ in range(BURST + 30)]]
        for _ in range(30):
            await waits.acquire()
        ended = asyncio.as_completed(codes)
        for _ in range(BURST):
            assert await next(ended) == grpc.StatusCode.UNAUTHENTICATED
        assert pace.num_held == 30
        assert await act(b"mine", metadata=[("known", "1")]) == b"mine", "behind them, on their connection"
        wake.set()
        assert set(await asyncio.gather(*codes)) == {grpc.StatusCode.UNAUTHENTICATED}
    assert pace.num_held == 0


async def test_refusals_of_a_caller_with_a_valid_credential_are_not_delayed() -> None:
    pace = RefusalPace(clock=lambda: 1000.0, sleep=lambda _: asyncio.Event().wait())
    async with served(pace) as act, asyncio.timeout(60):
        for _ in range(BURST + 5):
            code = await act(b"too much", metadata=[("known", "1")]).code()
            assert code == grpc.StatusCode.RESOURCE_EXHAUSTED
