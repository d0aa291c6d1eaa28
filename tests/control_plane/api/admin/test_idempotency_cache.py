"""Responses are given again by request id, and the cache is bounded."""

from __future__ import annotations

import asyncio

import pytest
from motet.v1 import adapters_pb2

from control_plane.api.admin.idempotency_cache import IdempotencyCache
from control_plane.errors import Exhausted, InvalidRequest

Response = adapters_pb2.GetAdapterResponse


def request(name: str = "x") -> adapters_pb2.GetAdapterRequest:
    return adapters_pb2.GetAdapterRequest(name=name)


def response(text: str) -> Response:
    return Response(adapter=adapters_pb2.Adapter(display_name=text))


async def call_once(cache: IdempotencyCache, request_id: str, text: str = "", name: str = "x") -> str:
    async def call() -> Response:
        return response(text)

    got = await cache.once("m", request_id, request(name), call, Response)
    return got.adapter.display_name


async def test_the_first_response_is_given_again_and_another_request_is_refused() -> None:
    cache = IdempotencyCache(clock=lambda: 0.0)
    assert [await call_once(cache, "id", text) for text in ("first", "second")] == ["first", "first"]
    assert await call_once(cache, "", "not remembered") == "not remembered"
    with pytest.raises(InvalidRequest, match="request_id: was used for another request"):
        await call_once(cache, "id", name="y")


async def test_a_response_is_forgotten_after_a_day() -> None:
    now_s = 0.0
    cache = IdempotencyCache(clock=lambda: now_s)
    assert await call_once(cache, "id", "first") == "first"
    now_s = 24 * 3600.0
    assert await call_once(cache, "id", "second") == "second"


async def test_concurrent_calls_with_one_request_id_run_once() -> None:
    cache, gate, num_calls = IdempotencyCache(clock=lambda: 0.0), asyncio.Event(), 0

    async def call() -> Response:
        nonlocal num_calls
        num_calls += 1
        await gate.wait()
        if num_calls == 1:
            raise RuntimeError("the first one fails")
        return response(str(num_calls))

    tasks = [asyncio.create_task(cache.once("m", "id", request(), call, Response)) for _ in range(3)]
    await asyncio.sleep(0)
    gate.set()
    done = await asyncio.gather(*tasks, return_exceptions=True)
    assert isinstance(done[0], RuntimeError) and done[1:] == [response("2")] * 2  # a failure is not remembered


async def test_the_oldest_responses_are_forgotten_beyond_a_number() -> None:
    cache = IdempotencyCache(clock=lambda: 0.0, max_entries=3)
    for index in range(10):
        await call_once(cache, str(index), "first")
        assert len(cache) <= 3
    assert [await call_once(cache, str(index), "again") for index in (7, 8, 9, 0)] == [
        "first",
        "first",
        "first",
        "again",
    ]


async def test_the_oldest_responses_are_forgotten_beyond_their_bytes() -> None:
    """10 000 responses of adapters with many labels were half a gigabyte."""
    cache = IdempotencyCache(clock=lambda: 0.0, max_bytes=100_000)
    for index in range(50):
        await call_once(cache, str(index), "x" * 20_000)
        assert cache.num_bytes <= 100_000 + 21_000
    assert 3 <= len(cache) <= 5
    assert await call_once(cache, "49", "again") == "x" * 20_000


async def test_bytes_balance_whatever_happens_to_a_call() -> None:
    cache = IdempotencyCache(clock=lambda: 0.0)

    async def fail() -> Response:
        raise RuntimeError("no")

    for index in range(5):
        with pytest.raises(RuntimeError):
            await cache.once("m", str(index), request(), fail, Response)
    assert (cache.num_bytes, len(cache)) == (0, 0)


async def test_calls_that_run_are_never_forgotten() -> None:
    cache, gate = IdempotencyCache(clock=lambda: 0.0, max_entries=2), asyncio.Event()

    async def wait() -> Response:
        await gate.wait()
        return response("done")

    running = [asyncio.create_task(cache.once("m", str(index), request(), wait, Response)) for index in range(2)]
    await asyncio.sleep(0)
    with pytest.raises(Exhausted, match="too many calls with a request_id are running"):
        await call_once(cache, "third")
    gate.set()
    assert await asyncio.gather(*running) == [response("done")] * 2
    assert await call_once(cache, "third", "fits now") == "fits now"
