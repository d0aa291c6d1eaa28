"""Who may use a resource next: one holder at a time, and the tenants that wait take turns."""

from __future__ import annotations

import asyncio
import contextlib
from collections import OrderedDict, deque
from collections.abc import AsyncIterator

from control_plane.errors import QueueFull


class Turns:
    """A lock that is fair to tenants: a tenant waits for at most one turn of each other tenant before its next turn.

    Used from one event loop.
    """

    def __init__(self, max_waiting: int) -> None:
        self._max_waiting = max_waiting
        # Invariant: no queue is empty. The first tenant is the next one. Each future is set when its turn comes.
        self._waiting: OrderedDict[str, deque[asyncio.Future[None]]] = OrderedDict()
        self._is_held = False

    @contextlib.asynccontextmanager
    async def turn(self, tenant: str) -> AsyncIterator[None]:
        """Wait for a turn of this tenant, and hold it. Raises QueueFull if too many calls of the tenant wait."""
        await self._take(tenant)
        try:
            yield
        finally:
            self._pass_on()

    def num_waiting(self, tenant: str) -> int:
        """How many calls of the tenant wait."""
        return len(self._waiting.get(tenant, ()))

    async def _take(self, tenant: str) -> None:
        if not self._is_held:
            self._is_held = True
            return
        if self.num_waiting(tenant) >= self._max_waiting:
            raise QueueFull(
                f"{self._max_waiting} requests of the tenant wait for their constraints to be checked, which is the "
                "limit; try again in a moment"
            )
        mine = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(tenant, deque()).append(mine)
        try:
            await mine
        except asyncio.CancelledError:
            if mine.done() and not mine.cancelled():  # the turn came, and is not used
                self._pass_on()
            else:
                self._drop(tenant, mine)
            raise

    def _drop(self, tenant: str, future: asyncio.Future[None]) -> None:
        queue = self._waiting.get(tenant)
        if queue is not None and future in queue:
            queue.remove(future)
            if not queue:
                del self._waiting[tenant]

    def _pass_on(self) -> None:
        while self._waiting:
            tenant, queue = self._waiting.popitem(last=False)
            mine = queue.popleft()
            if queue:
                self._waiting[tenant] = queue  # behind every other tenant
            if not mine.done():  # done: cancelled, and its caller did not run since
                mine.set_result(None)
                return
        self._is_held = False
