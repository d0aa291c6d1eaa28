"""Sample requests between their start and the retrieval of their result, on a clock of the test."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from gateway.tinker.futures import Futures, TooManySamples, UnknownSample
from gateway.tinker.settings import TinkerSettings


class Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


class Work:
    """Requests that end when the test says so."""

    def __init__(self) -> None:
        self.num_started = 0
        self.num_cancelled = 0
        self.end = asyncio.Event()

    def giving(self, result: bytes) -> Callable[[], Awaitable[bytes]]:
        async def work() -> bytes:
            self.num_started += 1
            try:
                await self.end.wait()
            except asyncio.CancelledError:
                self.num_cancelled += 1
                raise
            return result

        return work


async def ended(result: bytes) -> bytes:
    return result


async def failing() -> bytes:
    raise ValueError("no")


def futures(clock: Clock | None = None, **settings: float) -> Futures:
    return Futures(TinkerSettings(**settings), clock or Clock())  # type: ignore[arg-type]  # counts are given as such


async def test_a_result_is_returned_to_every_poll_until_its_time_is_over() -> None:
    clock = Clock()
    kept = futures(clock, result_ttl_s=10)
    kept.start("r", "me", lambda: ended(b"x"))
    assert await kept.wait("r", "me", 5.0) == b"x" == await kept.wait("r", "me", 5.0)
    clock.now_s = 10.0
    kept.sweep()
    assert len(kept) == 1
    clock.now_s = 10.5
    kept.sweep()
    with pytest.raises(UnknownSample):
        await kept.wait("r", "me", 5.0)


async def test_a_request_that_is_sent_twice_runs_once() -> None:
    work, kept = Work(), futures()
    for _ in range(2):
        kept.start("r", "me", work.giving(b"x"))
    assert await kept.wait("r", "me", 0.0) is None, "it runs"
    work.end.set()
    assert await kept.wait("r", "me", 5.0) == b"x" and work.num_started == 1


async def test_the_key_of_another_caller_finds_nothing() -> None:
    work, kept = Work(), futures()
    kept.start("r", "me", work.giving(b"x"))
    with pytest.raises(UnknownSample):
        await kept.wait("r", "you", 0.0)
    kept.cancel("r", "you")
    work.end.set()
    assert await kept.wait("r", "me", 5.0) == b"x"


async def test_an_error_is_an_outcome() -> None:
    kept = futures()
    kept.start("r", "me", failing)
    assert str(await kept.wait("r", "me", 5.0)) == "no"


async def test_a_cancelled_request_ends_and_so_does_the_poll_that_waits_for_it() -> None:
    work, kept = Work(), futures()
    kept.start("r", "me", work.giving(b"x"))
    waiting = asyncio.ensure_future(kept.wait("r", "me", 5.0))
    while not work.num_started or waiting.done():
        await asyncio.sleep(0)
    kept.cancel("r", "me")
    assert isinstance(await waiting, UnknownSample) and work.num_cancelled == 1 and len(kept) == 0


async def test_a_request_that_nobody_polls_is_cancelled_and_one_that_is_polled_is_not() -> None:
    clock, work = Clock(), Work()
    kept = futures(clock, abandoned_s=10)
    kept.start("left", "me", work.giving(b"x"))
    kept.start("polled", "me", work.giving(b"y"))
    waiting = asyncio.ensure_future(kept.wait("polled", "me", 5.0))
    while work.num_started < 2:
        await asyncio.sleep(0)
    clock.now_s = 11.0
    kept.sweep()
    work.end.set()
    assert await waiting == b"y" and work.num_cancelled == 1 and len(kept) == 1


async def test_an_id_that_another_key_uses_is_free_for_its_owner() -> None:
    """An attack would take the id before its owner does, or see from a refusal that it is in use."""
    kept = futures()
    kept.start("r", "thief", lambda: ended(b"theirs"))
    kept.start("r", "owner", lambda: ended(b"own"))
    assert await kept.wait("r", "owner", 5.0) == b"own"
    kept.cancel("r", "thief")
    assert await kept.wait("r", "owner", 5.0) == b"own" and len(kept) == 1


async def test_a_key_that_keeps_many_results_drops_none_of_another_key() -> None:
    kept = futures(max_result_bytes=1 << 20)
    kept.start("first", "modest", lambda: ended(bytes(1 << 18)))
    assert await kept.wait("first", "modest", 5.0)
    for number in range(20):
        kept.start(f"{number}", "greedy", lambda: ended(bytes(1 << 18)))
        assert await kept.wait(f"{number}", "greedy", 5.0)
    assert await kept.wait("first", "modest", 5.0) == bytes(1 << 18) and len(kept) == 4
    with pytest.raises(UnknownSample):
        await kept.wait("0", "greedy", 5.0)


async def test_above_the_bytes_the_oldest_results_go_and_what_runs_stays() -> None:
    work, kept = Work(), futures(max_result_bytes=1 << 20)
    kept.start("runs", "me", work.giving(b"x"))
    for name in ("a", "b", "c"):
        kept.start(name, "me", lambda: ended(bytes(1 << 19)))
        assert await kept.wait(name, "me", 5.0) == bytes(1 << 19)
    with pytest.raises(UnknownSample):
        await kept.wait("a", "me", 0.0)
    assert await kept.wait("b", "me", 0.0) == await kept.wait("c", "me", 0.0) == bytes(1 << 19)
    await kept.close()
    assert work.num_cancelled == 1 and len(kept) == 0


async def test_there_are_not_more_requests_than_the_limit() -> None:
    kept = futures(max_samples=1)
    kept.start("r", "me", lambda: ended(b"x"))
    with pytest.raises(TooManySamples):
        kept.start("s", "me", lambda: ended(b"y"))
    kept.cancel("r", "me")
    kept.start("s", "me", lambda: ended(b"y"))
    assert await kept.wait("s", "me", 5.0) == b"y"


async def test_at_the_limit_a_key_still_gets_its_equal_part_and_no_more() -> None:
    kept, work = futures(max_samples=4), Work()
    for number in range(4):
        kept.start(f"mine-{number}", "me", work.giving(b"x"))
    for number in range(2):
        kept.start(f"yours-{number}", "you", work.giving(b"y"))
    for owner in ("me", "you"):
        with pytest.raises(TooManySamples):
            kept.start("more", owner, work.giving(b"z"))
    kept.start("third", "somebody", work.giving(b"z"))
    kept.cancel("third", "somebody")
    for number in range(4):
        kept.cancel(f"mine-{number}", "me")
    kept.start("more", "me", work.giving(b"z"))
    await kept.close()
