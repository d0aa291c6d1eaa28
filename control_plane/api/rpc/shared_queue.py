"""Places of a SharedLimit that callers wait for instead of being refused."""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import AsyncIterator
from itertools import islice

from control_plane.api.rpc.shared_limit import SharedLimit

Holder = tuple[str, ...]

# Other holders that are looked at when a place comes back, each in its turn: one that may have a place gets it soon,
# and an attacker who is thousands of holders makes nobody slow.
MAX_LOOKS = 8


class SharedQueue:
    """Who gets a place of `limit` next. Callers above their equal part wait, and each holder's calls keep their order.

    For places that are held for a short time and wanted in bursts. Used from one event loop.
    """

    def __init__(self, limit: SharedLimit) -> None:
        self._limit = limit
        # Invariant: no queue is empty. A call that was cancelled stays until it comes up or runs.
        self._waiting: dict[Holder, deque[asyncio.Future[None]]] = {}

    @property
    def num_waiting(self) -> int:
        """How many calls wait at present."""
        return sum(map(len, self._waiting.values()))

    @contextlib.asynccontextmanager
    async def place(self, holder: Holder) -> AsyncIterator[None]:
        """Wait for a place, and hold it while the block runs."""
        if holder in self._waiting or not self._limit.take(holder):
            await self._wait(holder)
        try:
            yield
        finally:
            self._give_back(holder)

    async def _wait(self, holder: Holder) -> None:
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(holder, deque()).append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if turn.cancelled():
                self._forget(holder, turn)
            else:  # the place was given at the moment of the cancellation
                self._give_back(holder)
            raise

    def _give_back(self, holder: Holder) -> None:
        self._limit.give_back(holder)
        self._serve(holder)
        for other in list(islice(self._waiting, MAX_LOOKS)):
            self._serve(other)

    def _serve(self, holder: Holder) -> None:
        """Give the holder's calls what it may have. If more wait, the holder is the last one in line."""
        queue = self._waiting.pop(holder, deque())
        while queue and (queue[0].done() or self._limit.take(holder)):
            turn = queue.popleft()
            if not turn.done():
                turn.set_result(None)
        if queue:
            self._waiting[holder] = queue

    def _forget(self, holder: Holder, turn: asyncio.Future[None]) -> None:
        queue = self._waiting.get(holder)
        if queue is not None and turn in queue:
            queue.remove(turn)
            if not queue:
                del self._waiting[holder]
