"""Many requests at once: their order, their errors, and what is cancelled."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Awaitable, Callable, Iterator

import pytest
from motet import NotFound, Unavailable
from motet.errors import MotetError
from motet.offline.batch import LoopThread, run_all


@pytest.fixture
def loop() -> Iterator[LoopThread]:
    thread = LoopThread()
    yield thread
    thread.stop()


async def all_of(
    send: Callable[[int], Awaitable[object]],
    *,
    ended: BaseException | None = None,
    stops_at_error: bool = True,
    num: int = 5,
) -> tuple[list[object], list[object]]:
    done: list[object] = []
    gone: asyncio.Future[MotetError] = asyncio.get_running_loop().create_future()
    if isinstance(ended, MotetError):
        gone.set_result(ended)
    results = await run_all(
        range(num),
        send,
        max_in_flight=2,
        ended=gone,
        on_done=done.append,
        stops_at_error=stops_at_error,
    )
    return results, done


def test_results_are_in_the_order_of_the_items_and_so_many_are_under_way(loop: LoopThread) -> None:
    under_way, most = set[int](), [0]

    async def send(item: int) -> int:
        under_way.add(item)
        most[0] = max(most[0], len(under_way))
        for _ in range(10 - item):  # the first ends last
            await asyncio.sleep(0)
        under_way.remove(item)
        return item * item

    results, done = loop.run(all_of(send))
    assert results == [0, 1, 4, 9, 16]
    assert done != results
    assert sorted(map(str, done)) == sorted(map(str, results))
    assert most == [2]


async def fails_at_two(item: int) -> int:
    if item == 2:
        raise NotFound("no such adapter")
    return item


def test_the_first_error_is_raised_with_the_index_and_the_others_are_cancelled(loop: LoopThread) -> None:
    cancelled = []

    async def send(item: int) -> int:
        if item == 1:
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                cancelled.append(item)
                raise
        return await fails_at_two(item)

    with pytest.raises(NotFound) as raised:
        loop.run(all_of(send))
    assert raised.value.__notes__ == ["this was input 2 of 5; the others were cancelled"]
    assert cancelled == [1]


def test_an_error_can_stand_in_the_place_of_the_result(loop: LoopThread) -> None:
    results, done = loop.run(all_of(fails_at_two, stops_at_error=False))
    assert [results[0], results[1], results[3], results[4]] == [0, 1, 3, 4]
    assert isinstance(results[2], NotFound)
    assert len(done) == 5


def test_the_end_of_the_server_ends_the_batch(loop: LoopThread) -> None:
    async def send(item: int) -> None:
        await asyncio.Event().wait()

    with pytest.raises(Unavailable, match="the server ended"):
        loop.run(all_of(send, ended=Unavailable("the server ended")))


def test_an_interrupt_of_the_caller_cancels_what_is_under_way(loop: LoopThread) -> None:
    cancelled = []
    # A shell that runs the tests in the background has the signal ignored.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)

    async def send(item: int) -> None:
        if item == 1:
            os.kill(os.getpid(), signal.SIGINT)
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.append(item)

    try:
        with pytest.raises(KeyboardInterrupt):
            loop.run(all_of(send))
    finally:
        signal.signal(signal.SIGINT, before)
    assert sorted(cancelled) == [0, 1]
