"""Work beside serving: begun after the start, cancelled at the end."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Coroutine
from typing import Any


def begin(stack: contextlib.AsyncExitStack, *works: Coroutine[Any, Any, None]) -> None:
    """Do each work in a task of its own, until `stack` ends."""
    for work in works:
        stack.push_async_callback(_cancelled, asyncio.create_task(work))


async def _cancelled(task: asyncio.Task[None]) -> None:
    task.cancel()
    await asyncio.wait([task])
