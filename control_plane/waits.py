"""Waits with a bound, which a cancellation always ends."""

from __future__ import annotations

import asyncio


async def is_set_within(event: asyncio.Event, timeout_s: float | None) -> bool:
    """Wait until the event is set, for `timeout_s` at most (None: without end). Returns whether it is set."""
    try:
        async with asyncio.timeout(timeout_s):
            return await event.wait()
    except TimeoutError:
        return event.is_set()
