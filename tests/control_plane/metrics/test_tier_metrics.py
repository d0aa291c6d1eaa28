"""What is counted between the tiers of adapters."""

from __future__ import annotations

from prometheus_client import CollectorRegistry

from control_plane.metrics.tier_metrics import TierMetrics
from control_plane.observers.timings import FROM_CACHE, FROM_STORE


def test_each_time_is_in_the_series_of_its_kind() -> None:
    registry = CollectorRegistry()
    metrics = TierMetrics(registry)
    metrics.round_trip(0.002)
    metrics.slot_loaded(FROM_CACHE, 0.25, 1000)
    metrics.slot_loaded(FROM_STORE, 1.5, 3000)
    metrics.slot_loaded(FROM_STORE, 0.0, 500)  # the worker did not say how long it took
    metrics.slot_load_failed()
    metrics.slot_evicted()
    metrics.cache_call(0.001, is_ok=True)
    metrics.cache_call(1.0, is_ok=False)
    metrics.store_call("read", 0.01)
    metrics.store_call("change", 0.02)
    value = registry.get_sample_value
    assert value("motet_plan_stream_round_trip_seconds_sum") == 0.002
    assert value("motet_slot_load_seconds_sum", {"source": "host_cache"}) == 0.25
    assert value("motet_slot_load_seconds_count", {"source": "store"}) == 1
    assert value("motet_slot_load_bytes_total", {"source": "host_cache"}) == 1000
    assert value("motet_slot_load_bytes_total", {"source": "store"}) == 3500
    assert value("motet_slot_load_failures_total") == value("motet_slot_evictions_total") == 1
    assert value("motet_redis_call_seconds_sum", {"outcome": "ok"}) == 0.001
    assert value("motet_redis_call_seconds_sum", {"outcome": "failed"}) == 1.0
    assert value("motet_store_call_seconds_sum", {"kind": "read"}) == 0.01
    assert value("motet_store_call_seconds_sum", {"kind": "change"}) == 0.02


def test_every_series_is_there_before_anything_happened() -> None:
    registry = CollectorRegistry()
    TierMetrics(registry)
    assert registry.get_sample_value("motet_slot_load_seconds_count", {"source": "store"}) == 0
    assert registry.get_sample_value("motet_redis_call_seconds_count", {"outcome": "failed"}) == 0
