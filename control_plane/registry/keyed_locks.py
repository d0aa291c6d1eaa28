"""Locks by key, for coroutines: one holder per key, forgotten when nobody wants it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class KeyedLocks:
    """One lock for each key that anybody holds or waits for."""

    def __init__(self) -> None:
        self._shared: dict[str, _SharedLock] = {}

    def __len__(self) -> int:
        return len(self._shared)

    @asynccontextmanager
    async def hold(self, key: str) -> AsyncIterator[None]:
        """Have the key to oneself."""
        shared = self._shared.setdefault(key, _SharedLock())
        shared.num_users += 1
        try:
            async with shared.lock:
                yield
        finally:
            shared.num_users -= 1
            if not shared.num_users:
                del self._shared[key]


class _SharedLock:
    def __init__(self) -> None:
        self.lock = asyncio.Lock()
        self.num_users = 0  # who hold it or wait
