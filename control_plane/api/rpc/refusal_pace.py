"""Delays refusals, so that a flood of calls without a valid credential does not hold the event loop.

A refusal takes more than half the time of a status call (1,691 and 958 a second, 2 cores), and gRPC has no way to close
one connection. So what helps is that the caller has to wait: a client that keeps a number of calls open sends the next
ones only when the former ones have ended. A valid credential is never delayed. Used from one event loop.
"""

from __future__ import annotations

import asyncio
import math
import random
import time
from collections.abc import Awaitable, Callable

from control_plane.api.rpc.shared_limit import SharedLimit
from control_plane.caller import host_of

REFUSALS_PER_S = 100.0  # of one host, once it has used up BURST
BURST = 200  # refusals of one host at once
LEAST_DELAY_S = 0.001
MAX_DELAY_S = 10.0
DELAY_SPREAD = 2.0  # the longest delay in times of the shortest that a host far above its rate gets
MAX_HELD = 4096  # refusals that wait; hosts have equal parts
MAX_HOSTS = 10_000  # that are counted apart; the others share one count
_OTHERS = ""


class RefusalPace:
    """Delays the refusals of hosts that cause too many. `clock` and `sleep` are those of the event loop by default."""

    def __init__(
        self,
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[object]] = asyncio.sleep,
        max_held: int = MAX_HELD,
        max_hosts: int = MAX_HOSTS,
        rng: random.Random | None = None,
    ) -> None:
        self._rng = rng or random.Random(0)
        self._clock = clock
        self._sleep = sleep
        self._held = SharedLimit(max_held, "refusals that wait")
        self._max_hosts = max_hosts
        self._due_s: dict[str, float] = {}  # by host: when all its refusals so far would be out at REFUSALS_PER_S
        self._sweep_at_s = -math.inf

    @property
    def num_held(self) -> int:
        """How many refusals wait at present."""
        return self._held.num_held

    @property
    def num_hosts(self) -> int:
        """How many hosts are counted apart at present."""
        return len(self._due_s)

    async def wait(self, peer: str) -> None:
        """Return when a refused call of `peer` may end: at once, or up to MAX_DELAY_S later.

        Where too many refusals wait already, a host that has its part of them gets the next one at once: to hold more
        of them would take memory without a bound.
        """
        delay_s = self._delay_s(host_of(peer))
        holder = (host_of(peer), peer)
        if delay_s < LEAST_DELAY_S or not self._held.take(holder):
            return
        try:
            await self._sleep(delay_s)
        finally:
            self._held.give_back(holder)

    def _delay_s(self, host: str) -> float:
        now_s = self._clock()
        if now_s >= self._sweep_at_s:
            self._due_s = {other: due_s for other, due_s in self._due_s.items() if due_s > now_s}
            self._sweep_at_s = now_s + MAX_DELAY_S
        if host not in self._due_s and len(self._due_s) >= self._max_hosts:
            host = _OTHERS
        due_s = max(self._due_s.get(host, now_s), now_s) + 1.0 / REFUSALS_PER_S
        delay_s = due_s - now_s - BURST / REFUSALS_PER_S
        if delay_s > MAX_DELAY_S:  # the count stays where it is: what came beyond the longest delay is forgotten
            # Thousands of calls that wait equally long would come back in one moment, and hold up everybody's.
            return MAX_DELAY_S / self._rng.uniform(1.0, DELAY_SPREAD)
        self._due_s[host] = due_s
        return delay_s
