"""How long the steps between a request and its weights take.

The parts that measure a step call this interface; the metrics implement it.
"""

from __future__ import annotations

from typing import Protocol

# Where a worker's load got the weights from.
FROM_CACHE, FROM_STORE = "host_cache", "store"


class Timings(Protocol):
    """Learns of each one, in the event loop."""

    def round_trip(self, seconds: float) -> None:
        """A message went to a worker and its response came back."""

    def slot_loaded(self, source: str, seconds: float, size_bytes: int) -> None:
        """A worker loaded an adapter of this size; `seconds` is 0 where the worker did not say how long it took."""

    def slot_load_failed(self) -> None:
        """A worker could not load an adapter."""

    def slot_evicted(self) -> None:
        """A worker gave an adapter up, so that its slot is free."""

    def cache_call(self, seconds: float, *, is_ok: bool) -> None:
        """A call to Redis ended."""

    def store_call(self, kind: str, seconds: float) -> None:
        """A call to the artifact store ended: "read" or "change"."""


class NoTimings:
    """Nobody looks."""

    def round_trip(self, seconds: float) -> None:
        """See Timings."""

    def slot_loaded(self, source: str, seconds: float, size_bytes: int) -> None:
        """See Timings."""

    def slot_load_failed(self) -> None:
        """See Timings."""

    def slot_evicted(self) -> None:
        """See Timings."""

    def cache_call(self, seconds: float, *, is_ok: bool) -> None:
        """See Timings."""

    def store_call(self, kind: str, seconds: float) -> None:
        """See Timings."""


NO_TIMINGS = NoTimings()
