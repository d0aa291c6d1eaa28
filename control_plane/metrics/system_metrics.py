"""What the system holds at the moment of a scrape: workers, queues, blocks, adapters by tier. It counts nothing."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from motet.v1 import status_pb2
from prometheus_client import Metric
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily

MAX_LOADED_SERIES = 512  # adapters in arenas with a series; the count of all is in motet_adapters_loaded


@dataclass(frozen=True, slots=True)
class LoadedAdapter:
    """One adapter in one arena."""

    adapter: str  # its id; of several names, the first
    digest: str
    worker: str
    is_pinned: bool


@dataclass(frozen=True, slots=True)
class CacheCounts:
    """Counts of the host cache since the start."""

    num_hits: int
    num_misses: int
    num_corrupt: int
    num_evicted: int = 0
    pinned_bytes: int = 0
    cache_read_bytes: int = 0
    store_read_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The system at one moment."""

    status: status_pb2.GetStatusResponse  # as an admin sees it
    cache: CacheCounts
    loaded: tuple[LoadedAdapter, ...]  # ordered by worker and adapter
    max_loaded: int  # adapters that the arenas have slots for


def families(snapshot: Snapshot) -> Iterable[Metric]:
    """Every metric of the system."""
    yield from _build(snapshot.status)
    yield from _queues(snapshot.status.queues)
    yield from _workers(snapshot.status.workers)
    yield from _adapters(snapshot)
    yield from _audit(snapshot.status.audit)


def _build(status: status_pb2.GetStatusResponse) -> Iterable[Metric]:
    info = InfoMetricFamily("motet_build", "The server and the model that it serves.")
    model = status.model
    info.add_metric(
        [],
        {
            "version": status.server_version,
            "model_name": model.name,
            "fingerprint": model.fingerprint,
            "dtype": model.dtype,
            "max_model_len": str(model.max_model_len),
        },
    )
    yield info


def _queues(queues: status_pb2.QueueStatus) -> Iterable[Metric]:
    yield _gauge("motet_requests_running", "Requests that are computed.", queues.num_running)
    yield _gauge("motet_requests_waiting", "Requests that wait to run.", queues.num_waiting)
    yield _gauge("motet_requests_unfinished", "Requests that were accepted and have not ended.", queues.num_requests)
    yield _counter("motet_requests_accepted", "Requests that were accepted.", queues.num_accepted)
    yield _counter("motet_requests_rejected", "Requests that found a queue full.", queues.num_rejected)
    yield _counter("motet_migrations", "Requests that moved to another worker or session.", queues.num_migrated)


_WORKER_GAUGES = {
    "motet_worker_requests_running": ("num_running", "Requests that the worker computes."),
    "motet_worker_requests_waiting": ("num_waiting", "Requests that wait for the worker."),
    "motet_worker_plans_in_flight": ("num_plans_in_flight", "Plans whose results have not come."),
    "motet_worker_resident_bytes": ("resident_bytes", "Resident memory of the worker's process."),
    "motet_adapters_loaded": ("num_adapters_loaded", "Adapters in the worker's arena."),
    "motet_requests_swapped": ("num_swapped", "Requests whose KV blocks lie in host memory."),
}
_WORKER_COUNTERS = {
    "motet_worker_steps": ("num_steps", "Steps that the worker executed in its session."),
    "motet_worker_plans": ("num_plans", "Plans sent to the worker in its session."),
    "motet_worker_tokens_sampled": ("num_tokens_sampled", "Tokens that were sampled in the session."),
    "motet_prefix_cache_query_tokens": ("prefix_query_tokens", "Prompt tokens looked up in the prefix cache."),
    "motet_prefix_cache_hit_tokens": ("prefix_hit_tokens", "Prompt tokens found in the prefix cache."),
}


def _workers(workers: Iterable[status_pb2.WorkerStatus]) -> Iterable[Metric]:
    workers = list(workers)
    yield _gauge("motet_workers", "Workers that are attached.", len(workers))
    for name, (attribute, text) in _WORKER_GAUGES.items():
        yield _by_worker(GaugeMetricFamily(name, text, labels=["worker"]), workers, attribute)
    for name, (attribute, text) in _WORKER_COUNTERS.items():
        yield _by_worker(CounterMetricFamily(name, text, labels=["worker"]), workers, attribute)
    step = GaugeMetricFamily("motet_worker_step_seconds", "Mean time of the latest steps.", labels=["worker"])
    trip = GaugeMetricFamily(
        "motet_worker_round_trip_seconds", "Median time to the worker and back.", labels=["worker"]
    )
    info = InfoMetricFamily("motet_worker", "A worker.", labels=["worker"])
    for worker in workers:
        step.add_metric([worker.worker_id], worker.step_time_ms / 1000)
        trip.add_metric([worker.worker_id], worker.round_trip_ms / 1000)
        info.add_metric([worker.worker_id], {"device": worker.device, "block_size": str(worker.block_size)})
    yield from (step, trip, info, *_blocks(workers), _arena(workers), _preemptions(workers))


def _blocks(workers: Iterable[status_pb2.WorkerStatus]) -> Iterable[Metric]:
    blocks = GaugeMetricFamily("motet_kv_blocks", "KV blocks by state.", labels=["worker", "state"])
    host = GaugeMetricFamily("motet_host_kv_blocks", "KV blocks in host memory by state.", labels=["worker", "state"])
    usage = GaugeMetricFamily(
        "motet_kv_cache_usage_ratio", "Part of the KV blocks that requests hold.", labels=["worker"]
    )
    for worker in workers:
        name, held, cached = worker.worker_id, worker.num_blocks_held, worker.num_blocks_cached
        for state, count in (("held", held), ("cached", cached), ("free", worker.num_blocks - held - cached)):
            blocks.add_metric([name, state], count)
        host.add_metric([name, "held"], worker.num_host_blocks_held)
        host.add_metric([name, "free"], worker.num_host_blocks - worker.num_host_blocks_held)
        usage.add_metric([name], held / worker.num_blocks if worker.num_blocks else 0.0)
    return blocks, host, usage


def _arena(workers: Iterable[status_pb2.WorkerStatus]) -> Metric:
    arena = GaugeMetricFamily("motet_arena_bytes", "Memory for adapters by state.", labels=["worker", "state"])
    for worker in workers:
        arena.add_metric([worker.worker_id, "used"], worker.arena_used_bytes)
        arena.add_metric([worker.worker_id, "free"], worker.arena_bytes - worker.arena_used_bytes)
    return arena


def _preemptions(workers: Iterable[status_pb2.WorkerStatus]) -> Metric:
    preemptions = CounterMetricFamily(
        "motet_preemptions", "Requests that gave up their KV blocks, by kind.", labels=["worker", "kind"]
    )
    for worker in workers:
        preemptions.add_metric([worker.worker_id, "swap"], worker.num_swapped_out)
        preemptions.add_metric([worker.worker_id, "recompute"], worker.num_preemptions - worker.num_swapped_out)
    return preemptions


def _adapters(snapshot: Snapshot) -> Iterable[Metric]:
    adapters, cache = snapshot.status.adapters, snapshot.cache
    yield _gauge("motet_registry_adapters", "Names that are registered.", adapters.num_registered)
    yield _gauge("motet_store_adapters", "Distinct adapters in the artifact store.", adapters.num_stored)
    yield _gauge("motet_host_cache_adapters", "Adapters in the host cache.", adapters.num_host_cached)
    sizes = GaugeMetricFamily("motet_host_cache_bytes", "Memory of the host cache by state.", labels=["state"])
    sizes.add_metric(["used"], adapters.host_cache_bytes)
    sizes.add_metric(["free"], max(adapters.host_cache_budget_bytes - adapters.host_cache_bytes, 0))
    yield sizes
    yield _gauge("motet_host_cache_available", "1 while the host cache responds.", float(adapters.host_cache_available))
    yield _counter("motet_host_cache_hits", "Adapters that were opened from the host cache.", cache.num_hits)
    yield _counter("motet_host_cache_misses", "Adapters that were opened from the store.", cache.num_misses)
    yield _counter("motet_host_cache_corrupt", "Cached parts whose hash was wrong.", cache.num_corrupt)
    yield _counter("motet_host_cache_evictions", "Adapters that left the host cache to make room.", cache.num_evicted)
    yield _gauge("motet_host_cache_pinned_bytes", "Bytes that pins keep in the host cache.", cache.pinned_bytes)
    read = CounterMetricFamily("motet_weights_read_bytes", "Weights read by the control plane.", labels=["source"])
    read.add_metric(["host_cache"], cache.cache_read_bytes)
    read.add_metric(["store"], cache.store_read_bytes)
    yield read
    loaded = GaugeMetricFamily(
        "motet_adapter_loaded", "1 for an adapter in an arena.", labels=["adapter", "digest", "worker", "pinned"]
    )
    for each in snapshot.loaded[:MAX_LOADED_SERIES]:
        loaded.add_metric([each.adapter, each.digest[:12], each.worker, str(each.is_pinned).lower()], 1)
    yield loaded


def _audit(audit: status_pb2.AuditStatus) -> Iterable[Metric]:
    if audit.is_on:
        yield _counter("motet_audit_lines", "Lines of the audit log.", audit.num_lines)
        yield _counter("motet_audit_lost", "Records that were not written.", audit.num_lost)
        yield _gauge("motet_audit_writable", "1 while the audit log can be written.", float(not audit.error))


def _by_worker(
    family: GaugeMetricFamily | CounterMetricFamily, workers: Iterable[status_pb2.WorkerStatus], attribute: str
) -> Metric:
    for worker in workers:
        family.add_metric([worker.worker_id], getattr(worker, attribute))
    return family


def _gauge(name: str, text: str, value: float) -> Metric:
    return GaugeMetricFamily(name, text, value=value)


def _counter(name: str, text: str, value: float) -> Metric:
    return CounterMetricFamily(name, text, value=value)
