"""A wait ends with its event, its bound or its cancellation, whichever comes first."""

from __future__ import annotations

import asyncio

import pytest

from control_plane.waits import is_set_within


async def test_a_wait_ends_with_its_event_or_its_bound() -> None:
    event = asyncio.Event()
    assert not await is_set_within(event, 0)
    waiting = asyncio.create_task(is_set_within(event, None))
    await asyncio.sleep(0)
    event.set()
    assert await waiting
    assert await is_set_within(event, 0)


async def test_a_cancellation_just_after_the_event_is_not_dropped() -> None:
    """`asyncio.wait_for` drops it before Python 3.12: the keeper and the token keys went on, and their end waited."""
    for num_rounds in range(4):
        event = asyncio.Event()
        waiting = asyncio.create_task(forever(event))
        await asyncio.sleep(0)
        event.set()
        for _ in range(num_rounds):
            await asyncio.sleep(0)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            async with asyncio.timeout(5):
                await waiting


async def forever(event: asyncio.Event) -> None:
    while True:
        await is_set_within(event, 60)
        event.clear()
