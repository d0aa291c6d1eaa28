"""What is counted between the tiers of adapters, and on the way to workers: loads, calls of Redis and of the store."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Histogram

from contract.metrics.buckets import LOAD_BUCKETS
from control_plane.observers.timings import FROM_CACHE, FROM_STORE

CALL_BUCKETS = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0, 30.0)
_SOURCES, _OUTCOMES, _KINDS = (FROM_CACHE, FROM_STORE), ("ok", "failed"), ("read", "change")


class TierMetrics:
    """See observers.timings.Timings. The labels have fixed values, so each series is there from the beginning."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._round_trip = Histogram(
            "motet_plan_stream_round_trip_seconds",
            "Round trips of pings to workers.",
            buckets=CALL_BUCKETS,
            registry=registry,
        )
        loads = Histogram(
            "motet_slot_load_seconds",
            "Loads of adapters into slots, as workers report them, by where the weights were.",
            ["source"],
            buckets=LOAD_BUCKETS,
            registry=registry,
        )
        sizes = Counter(
            "motet_slot_load_bytes", "Bytes of adapters that were loaded into slots.", ["source"], registry=registry
        )
        self._loads = {source: (loads.labels(source), sizes.labels(source)) for source in _SOURCES}
        self._failed = Counter("motet_slot_load_failures", "Loads that workers could not do.", registry=registry)
        self._evicted = Counter("motet_slot_evictions", "Adapters that left their slots.", registry=registry)
        redis = Histogram(
            "motet_redis_call_seconds", "Calls to Redis.", ["outcome"], buckets=CALL_BUCKETS, registry=registry
        )
        self._redis = {outcome: redis.labels(outcome) for outcome in _OUTCOMES}
        store = Histogram(
            "motet_store_call_seconds", "Calls to the store.", ["kind"], buckets=CALL_BUCKETS, registry=registry
        )
        self._store = {kind: store.labels(kind) for kind in _KINDS}

    def round_trip(self, seconds: float) -> None:
        """See Timings."""
        self._round_trip.observe(seconds)

    def slot_loaded(self, source: str, seconds: float, size_bytes: int) -> None:
        """See Timings."""
        times, sizes = self._loads[source]
        if seconds:
            times.observe(seconds)
        sizes.inc(size_bytes)

    def slot_load_failed(self) -> None:
        """See Timings."""
        self._failed.inc()

    def slot_evicted(self) -> None:
        """See Timings."""
        self._evicted.inc()

    def cache_call(self, seconds: float, *, is_ok: bool) -> None:
        """See Timings."""
        self._redis["ok" if is_ok else "failed"].observe(seconds)

    def store_call(self, kind: str, seconds: float) -> None:
        """See Timings."""
        self._store[kind].observe(seconds)
