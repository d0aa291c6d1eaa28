"""Bounds how many texts are tokenised at once, and gives the tenants turns.

Called by the codec before each text that costs more than a moment. Keeps counts only: it starts no threads and reads no
clock.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter, OrderedDict, deque
from collections.abc import AsyncIterator
from dataclasses import dataclass

from control_plane.errors import Exhausted

RETRY_S = 1.0  # a text of 1 MiB takes about half a second


@dataclass(frozen=True, slots=True)
class FairGateStats:
    """What is inside, and what waits."""

    num_inside: int  # texts that have a place
    num_tenants_inside: int
    num_tenants_waiting: int  # those with a cancelled turn that has not come up yet included
    num_waiting_bytes: int  # of all texts that wait for a place


class FairGate:
    """Gives places to tenants, round robin. No tenant has all places, so that none waits for one other alone."""

    def __init__(self, num_places: int, max_waiting_bytes: int) -> None:
        assert num_places > 1, f"{num_places} places cannot be shared"
        self._num_places = num_places
        self._max_waiting_bytes = max_waiting_bytes
        self._num_inside = 0
        self._num_inside_by_tenant: Counter[str] = Counter()
        # The tenant whose turn is next comes first; a turn that was cancelled stays until it comes up.
        self._waiting: OrderedDict[str, deque[asyncio.Future[None]]] = OrderedDict()
        self.num_waiting_bytes = 0  # of all texts that wait for a place
        self._waiting_bytes_by_tenant: Counter[str] = Counter()

    def stats(self) -> FairGateStats:
        """Counts at present."""
        return FairGateStats(
            self._num_inside, len(self._num_inside_by_tenant), len(self._waiting), self.num_waiting_bytes
        )

    @contextlib.asynccontextmanager
    async def place(self, tenant: str, size_bytes: int) -> AsyncIterator[None]:
        """Hold a place while the block runs. Raises Exhausted if too much waits already."""
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(tenant, deque()).append(turn)
        self._give_places()
        if not turn.done():
            await self._wait(turn, tenant, size_bytes)
        try:
            yield
        finally:
            self._leave(tenant)

    async def _wait(self, turn: asyncio.Future[None], tenant: str, size_bytes: int) -> None:
        # A tenant may have as much waiting as is free then: one alone takes half, and each further one finds room.
        waiting, free_bytes = self._waiting_bytes_by_tenant[tenant], self._max_waiting_bytes - self.num_waiting_bytes
        if waiting + size_bytes > free_bytes:
            turn.cancel()
            raise Exhausted(
                f"texts of {waiting} bytes from tenant {tenant} wait for the tokenizer, and this request adds "
                f"{size_bytes}; the limit is {self._max_waiting_bytes} for all tenants, and for one tenant what is "
                f"free; try again in {RETRY_S:g} s, or send token_ids",
                retry_after_s=RETRY_S,
            )
        self.num_waiting_bytes += size_bytes
        self._waiting_bytes_by_tenant[tenant] += size_bytes
        try:
            await turn
        except asyncio.CancelledError:
            if not turn.cancelled():
                self._leave(tenant)  # the place was given at the moment of the cancellation
            raise
        finally:
            self.num_waiting_bytes -= size_bytes
            _subtract(self._waiting_bytes_by_tenant, tenant, size_bytes)

    def _leave(self, tenant: str) -> None:
        self._num_inside -= 1
        _subtract(self._num_inside_by_tenant, tenant, 1)
        self._give_places()

    def _give_places(self) -> None:
        """Give free places to those whose turn it is."""
        for tenant in list(self._waiting):
            if self._num_inside >= self._num_places:
                return
            turns = self._waiting[tenant]
            while turns and turns[0].done():
                turns.popleft()
            if turns and self._num_inside_by_tenant[tenant] < self._num_places - 1:
                turns.popleft().set_result(None)
                self._num_inside += 1
                self._num_inside_by_tenant[tenant] += 1
                self._waiting.move_to_end(tenant)
            if not turns:
                del self._waiting[tenant]


def _subtract(counts: Counter[str], key: str, number: int) -> None:
    counts[key] -= number
    if not counts[key]:
        del counts[key]
