"""Fills the host cache with adapters that workers will load. A load does not wait for it."""

from __future__ import annotations

import asyncio
import logging
from typing import Protocol

from control_plane.errors import MotetError
from control_plane.host_cache.base import CacheAddress

logger = logging.getLogger(__name__)


class WeightsLike(Protocol):
    """What the fleet needs of the host cache."""

    @property
    def worker_address(self) -> CacheAddress:
        """Where workers read adapters by themselves."""

    def is_cached(self, digest: str) -> bool:
        """Whether the host cache is thought to hold an adapter."""

    def damage(self, digest: str) -> MotetError | None:
        """The error for an adapter whose stored weights were found wrong."""

    async def ensure_cached(self, digest: str) -> None:
        """Bring an adapter into the host cache."""


class CacheWarmer:
    """One task per adapter on its way into the cache."""

    def __init__(self, weights: WeightsLike) -> None:
        self._weights = weights
        self._tasks: dict[str, asyncio.Task[None]] = {}  # by digest

    def warm(self, digest: str) -> None:
        """Start bringing the adapter into the cache, unless that is under way."""
        if digest not in self._tasks:
            task = asyncio.get_running_loop().create_task(self._ensure_cached(digest))
            self._tasks[digest] = task
            task.add_done_callback(lambda _: self._tasks.pop(digest, None))

    async def close(self) -> None:
        """Stop every task."""
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _ensure_cached(self, digest: str) -> None:
        try:
            await self._weights.ensure_cached(digest)
        except MotetError as error:
            # The worker calls FetchAdapter next, and reports what it gets.
            logger.warning("adapter not cached digest=%s: %s", digest, error)
        except Exception:  # the task's edge
            logger.exception("adapter not cached digest=%s", digest)
