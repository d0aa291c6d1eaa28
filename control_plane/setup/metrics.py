"""The metrics of this process: what its parts count into, and the port that shows it with the state of the system."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable

from control_plane.api.gate import ShutdownGate
from control_plane.api.rpc.interceptor import OnRefused
from control_plane.api.status import StatusService
from control_plane.caller import Caller
from control_plane.config import ConfigError
from control_plane.errors import MotetError
from control_plane.fleet.fleet import Fleet
from control_plane.host_cache.weights import AdapterWeights
from control_plane.metrics.port import Pages, new_registry, open_port
from control_plane.metrics.request_metrics import RequestMetrics
from control_plane.metrics.system_metrics import CacheCounts, LoadedAdapter, Snapshot
from control_plane.metrics.tier_metrics import TierMetrics
from control_plane.observers.ended_request import Observer, Observers
from control_plane.observers.request_log import RequestLog
from control_plane.observers.spans import RequestSpans, TracingNotInstalled, open_spans
from control_plane.observers.timings import NO_TIMINGS, Timings
from control_plane.registry.registry import Registry


class ControlPlaneMetrics:
    """`requests` counts and logs from the beginning; serve() shows it. Without an address nothing is counted."""

    def __init__(self, address: str | None, spans: Observer | None = None) -> None:
        """`address`: HOST:PORT to listen on; None: nowhere. `spans` learns of requests, too."""
        self._address = address
        self._registry = new_registry()
        self._counted = None if address is None else RequestMetrics(self._registry)
        self.timings: Timings = NO_TIMINGS if address is None else TierMetrics(self._registry)
        observers: list[Observer | None] = [RequestLog(), self._counted, spans]
        self.requests: Observer = Observers(*(each for each in observers if each is not None))

    def counting(self, on_refused: OnRefused) -> OnRefused:
        """What counts an error before it is handed on."""

        def count(method: str, caller: Caller, error: MotetError) -> None:
            self.requests.refused(error.reason)
            on_refused(method, caller, error)

        return count

    def serve(
        self,
        stack: contextlib.AsyncExitStack,
        status: StatusService,
        registry: Registry,
        weights: AdapterWeights,
        fleet: Fleet,
        gate: ShutdownGate,
    ) -> None:
        """Listen, until `stack` ends. Raises ValueError if the address cannot be listened on."""
        if self._address is None or self._counted is None:
            return
        counted = self._counted

        def take() -> Snapshot:
            counted.count()
            return snapshot(status, registry, weights, fleet)

        pages = Pages(self._registry, take, asyncio.get_running_loop())
        open_port(self._address, pages, is_ready(fleet, gate), stack)


def open_tracing(endpoint: str | None, stack: contextlib.AsyncExitStack) -> RequestSpans | None:
    """What sends spans to this collector, until `stack` ends; None: nowhere. Raises ConfigError."""
    if endpoint is None:
        return None
    try:
        spans = open_spans(endpoint)
    except TracingNotInstalled as error:
        raise ConfigError(str(error)) from error
    stack.push_async_callback(asyncio.to_thread, spans.close)
    return spans


def is_ready(fleet: Fleet, gate: ShutdownGate) -> Callable[[], bool]:
    """Whether generations are served, or wait for a worker that is started for them, and the server is not stopping."""
    return lambda: fleet.workload.is_served and not gate.is_closed


def snapshot(status: StatusService, registry: Registry, weights: AdapterWeights, fleet: Fleet) -> Snapshot:
    """The system at this moment: no await between the reads."""
    cache = weights.stats()
    loaded = [
        LoadedAdapter(name, digest, worker_id, is_pinned=weights.is_pinned(digest))
        for digest, worker_ids in fleet.residency.workers_by_digest().items()
        for worker_id in worker_ids
        if (name := min(registry.names_of(digest), default=""))
    ]
    return Snapshot(
        status=status.whole(),
        cache=CacheCounts(
            *(cache.num_hits, cache.num_misses, cache.num_corrupt, cache.num_evicted, cache.pinned_bytes),
            *(cache.cache_read_bytes, cache.store_read_bytes),
        ),
        loaded=tuple(sorted(loaded, key=lambda each: (each.worker, each.adapter))),
        max_loaded=fleet.residency.num_slots(),
    )
