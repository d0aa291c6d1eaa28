"""Locks by key, for coroutines: one holder per key. A lock is removed when it has no holder and no waiter."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

CHECK_INTERVAL_S = 1.0


class KeyedLocks:
    """One lock for each key that has a holder or a waiter.

    `check` is called every CHECK_INTERVAL_S by each waiter, and may raise to end that wait.
    """

    def __init__(self, check: Callable[[], None] = lambda: None) -> None:
        self._check = check
        self._shared: dict[str, _SharedLock] = {}

    def __len__(self) -> int:
        return len(self._shared)

    @asynccontextmanager
    async def hold(self, key: str) -> AsyncIterator[None]:
        """Hold the key's lock while the block runs."""
        shared = self._shared.setdefault(key, _SharedLock())
        shared.num_users += 1
        try:
            await self._acquire(shared.lock)
            try:
                yield
            finally:
                shared.lock.release()
        finally:
            shared.num_users -= 1
            if not shared.num_users:
                del self._shared[key]

    async def _acquire(self, lock: asyncio.Lock) -> None:
        while True:
            try:
                async with asyncio.timeout(CHECK_INTERVAL_S):
                    await lock.acquire()
                return
            except TimeoutError:
                self._check()


class _SharedLock:
    def __init__(self) -> None:
        self.lock = asyncio.Lock()
        self.num_users = 0  # who hold it or wait
