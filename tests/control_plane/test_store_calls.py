"""Calls of a store that hangs, fails and comes back."""

from __future__ import annotations

import asyncio
import threading

import pytest

from control_plane.errors import StoreUnavailable
from control_plane.store_calls import HANG, MAX_HUNG_CALLS, StoreCalls


class HungStore:
    """A call that hangs until the store is back."""

    def __init__(self) -> None:
        self.is_back = threading.Event()
        self.num_calls = 0

    def call(self) -> str:
        self.num_calls += 1
        assert self.is_back.wait(60)
        return "done"


async def test_a_read_has_a_time_limit_and_the_thread_is_found_again_later() -> None:
    calls, store = StoreCalls(timeout_s=0.05), HungStore()
    with pytest.raises(StoreUnavailable, match=r"did not respond within 0\.05 s"):
        await calls.read(store.call)
    assert calls.num_hung == 1
    assert await StoreCalls().read(lambda: 7) == 7
    store.is_back.set()
    while calls.num_hung:
        await asyncio.sleep(0)
    calls.close()


async def test_once_enough_calls_hang_others_are_refused_at_once() -> None:
    calls, store = StoreCalls(timeout_s=0.05), HungStore()
    refused = await asyncio.gather(*(calls.read(store.call) for _ in range(MAX_HUNG_CALLS + 3)), return_exceptions=True)
    assert all(isinstance(error, StoreUnavailable) for error in refused)
    before = store.num_calls
    with pytest.raises(StoreUnavailable):
        await calls.read(store.call)
    with pytest.raises(StoreUnavailable):
        await calls.change(store.call)
    assert store.num_calls == before
    store.is_back.set()
    while calls.num_hung:
        await asyncio.sleep(0)
    assert await calls.change(store.call) == "done"
    calls.close()


async def test_a_change_is_waited_for_to_its_end_and_who_waits_hears_that_it_hangs() -> None:
    calls, store, hang = StoreCalls(timeout_s=0.05), HungStore(), asyncio.Event()
    token = HANG.set(hang)
    change = asyncio.ensure_future(calls.change(store.call))
    HANG.reset(token)
    await asyncio.wait_for(hang.wait(), 60)
    assert not change.done()
    store.is_back.set()
    assert await change == "done"
    assert calls.num_hung == 0
    calls.close()


async def test_a_large_write_has_more_time() -> None:
    calls, store, hang = StoreCalls(timeout_s=0.05), HungStore(), asyncio.Event()
    token = HANG.set(hang)
    change = asyncio.ensure_future(calls.change(store.call, size_bytes=1 << 40))
    HANG.reset(token)
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(hang.wait(), 0.3)
    store.is_back.set()
    assert await change == "done"
    calls.close()


async def test_errors_come_through_and_one_of_a_call_that_nobody_waits_for_is_not_lost_in_silence() -> None:
    with pytest.raises(FileNotFoundError):
        await StoreCalls().read(open, "/nowhere/at/all")
    calls = StoreCalls(timeout_s=0.05)
    is_back = threading.Event()

    def fail() -> None:
        is_back.wait(60)
        raise OSError("late")

    with pytest.raises(StoreUnavailable):
        await calls.read(fail)
    is_back.set()
    while calls.num_hung:  # the suite turns an error that nobody took into a failure
        await asyncio.sleep(0)
    calls.close()
