"""Values of a label that clients choose, such as names of adapters: a bounded number have series of their own."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable

OTHER = "_other"  # stands for all further values; no name of an adapter or tenant begins so


class BoundedLabels:
    """Which values have series of their own: at most `limit`, those that came first and are still used.

    A value that was not used for `idle_s` leaves its place to the next one that needs it. Every series only grows, the
    one of OTHER too: what a value did before it got a place, or after it lost it, stays with OTHER.
    """

    def __init__(
        self, limit: int, idle_s: float, clock: Callable[[], float], on_lost: Callable[[str], None] = lambda _: None
    ) -> None:
        """`on_lost`: called with a value that lost its place, to remove its series."""
        self._limit = limit
        self._idle_s = idle_s
        self._clock = clock
        self._on_lost = on_lost
        self._used_s: OrderedDict[str, float] = OrderedDict()  # value -> last use, the longest unused first

    def label(self, value: str) -> str:
        """The value itself, or OTHER. Counts as a use."""
        now_s = self._clock()
        if value not in self._used_s and len(self._used_s) >= self._limit:
            oldest, used_s = next(iter(self._used_s.items()))
            if now_s - used_s < self._idle_s:
                return OTHER
            del self._used_s[oldest]
            self._on_lost(oldest)
        self._used_s[value] = now_s
        self._used_s.move_to_end(value)
        return value
