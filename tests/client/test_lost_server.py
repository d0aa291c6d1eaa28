"""The server dies, is terminated or is away while calls wait for it. Real processes, real clocks, bounded waits."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from motet import AsyncClient, Client, DeadlineExceeded, MotetError, RetryPolicy, Unavailable

from tests.client.lost_server import TEXT, TOKENS, LostServer

RETRY = RetryPolicy(max_attempts=2, initial_backoff_s=0.05, max_backoff_s=0.2)
NUM_CALLS = 6
MANY = 5  # attempts of a call, more than RETRY allows a server that responds
JOIN_S = 60.0  # a call that lasts longer hangs


@pytest.fixture
def server() -> Iterator[LostServer]:
    lost = LostServer()
    yield lost
    lost.kill()


class Calls:
    """Several generations at once, by either client, each in a thread; `results` has texts and errors."""

    def __init__(self, target: str, *, is_async: bool, timeout_s: float, **options: Any) -> None:
        self.results: list[str | MotetError] = []
        self._num_pauses = threading.Semaphore(0)
        self._target, self._timeout_s, self._options = target, timeout_s, options
        run = self._run_async if is_async else self._run
        self._client = Client(target, retry=RETRY, sleep=self._sleep)
        self._threads = [threading.Thread(target=run, daemon=True) for _ in range(NUM_CALLS)]
        for thread in self._threads:
            thread.start()

    def wait_for_pauses(self, number: int) -> None:
        """Return when the calls have waited so many times more, all in all, before another attempt."""
        for _ in range(number):
            assert self._num_pauses.acquire(timeout=JOIN_S), "the calls do not try again"

    def join(self) -> list[str | MotetError]:
        """The results. Fails if a call hangs."""
        deadline = time.monotonic() + JOIN_S
        for thread in self._threads:
            thread.join(max(deadline - time.monotonic(), 0.0))
        num_hanging = sum(thread.is_alive() for thread in self._threads)
        assert not num_hanging, f"{num_hanging} of {NUM_CALLS} calls hang"
        self._client.close()
        return self.results

    def _run(self) -> None:
        def generate() -> str:
            result = self._client.generate("hi", timeout_s=self._timeout_s, **self._options).result()
            assert all(completion.token_ids == tuple(TOKENS) for completion in result.completions)
            return result.text

        self._keep(generate)

    def _run_async(self) -> None:
        async def generate() -> str:
            async with AsyncClient(self._target, retry=RETRY, sleep=self._async_sleep) as client:
                result = await client.generate("hi", timeout_s=self._timeout_s, **self._options).result()
                assert all(completion.token_ids == tuple(TOKENS) for completion in result.completions)
                return result.text

        self._keep(lambda: asyncio.run(generate()))

    def _keep(self, generate: Callable[[], str]) -> None:
        try:
            self.results.append(generate())
        except MotetError as error:
            self.results.append(error)

    def _sleep(self, seconds: float) -> None:
        self._num_pauses.release()
        threading.Event().wait(seconds)

    async def _async_sleep(self, seconds: float) -> None:
        self._num_pauses.release()
        await asyncio.sleep(seconds)


@pytest.fixture(params=["sync", "async"])
def is_async(request: pytest.FixtureRequest) -> bool:
    return bool(request.param == "async")


def test_server_killed_before_the_first_token_that_stays_away_ends_every_call_in_time(
    server: LostServer, is_async: bool
) -> None:
    server.start("silent")
    calls = Calls(server.target, is_async=is_async, timeout_s=4.0)
    server.wait_for_calls(NUM_CALLS)
    server.kill()
    calls.wait_for_pauses(MANY * NUM_CALLS)
    results = calls.join()
    # The time ends between two attempts, or within one: the machine decides which.
    assert len(results) == NUM_CALLS and all(isinstance(result, Unavailable | DeadlineExceeded) for result in results)
    assert all("no Motet server responds at" in str(result) for result in results)


@pytest.mark.parametrize(("behaviour", "n"), [("silent", 1), ("half", 1), ("half", 2)])
def test_server_that_is_away_for_longer_than_all_attempts_loses_no_call(
    server: LostServer, is_async: bool, behaviour: str, n: int
) -> None:
    server.start(behaviour)
    calls = Calls(server.target, is_async=is_async, timeout_s=50.0, n=n)
    server.wait_for_calls(NUM_CALLS)
    server.kill()
    calls.wait_for_pauses(MANY * NUM_CALLS)
    server.start("serve")
    assert calls.join() == [TEXT] * NUM_CALLS


def test_completions_that_came_before_the_server_was_killed_are_kept(server: LostServer, is_async: bool) -> None:
    server.start("whole")
    calls = Calls(server.target, is_async=is_async, timeout_s=50.0)
    server.wait_for_calls(NUM_CALLS)
    server.kill()  # what a client has not read by now, it requests from the next server
    server.start("serve")
    assert calls.join() == [TEXT] * NUM_CALLS


@pytest.mark.parametrize("n", [1, 2])
def test_stream_whose_completions_all_ended_ends_with_its_connection(server: LostServer, n: int) -> None:
    server.start("whole")
    with Client(server.target, retry=RETRY) as client, client.generate("hi", n=n, timeout_s=50.0) as stream:
        while len(stream.completions) < n:
            next(stream)
        server.kill()
        assert list(stream) == []
        assert [completion.text for completion in stream.result().completions] == [TEXT] * n


@pytest.mark.parametrize("n", [1, 2])
async def test_async_stream_whose_completions_all_ended_ends_with_its_connection(server: LostServer, n: int) -> None:
    server.start("whole")
    client = AsyncClient(server.target, retry=RETRY)
    async with client, client.generate("hi", n=n, timeout_s=50.0) as stream:
        while len(stream.completions) < n:
            await anext(stream)
        server.kill()
        assert [chunk async for chunk in stream] == []
        assert [completion.text for completion in (await stream.result()).completions] == [TEXT] * n


@pytest.mark.parametrize("behaviour", ["silent", "half"])
def test_calls_that_a_terminated_server_cancels_go_on_at_the_next_one(
    server: LostServer, is_async: bool, behaviour: str
) -> None:
    server.start(behaviour)
    calls = Calls(server.target, is_async=is_async, timeout_s=50.0)
    server.wait_for_calls(NUM_CALLS)
    server.terminate()
    server.start("serve")
    assert calls.join() == [TEXT] * NUM_CALLS
