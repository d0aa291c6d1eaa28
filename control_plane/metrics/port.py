"""The metrics of the control plane as pages: what was counted, with a look at the system at the moment of a scrape."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Iterable, Sequence

from prometheus_client import CollectorRegistry, Metric, ProcessCollector
from prometheus_client.exposition import choose_encoder

from contract.metrics.port import MetricsPort, Page, cannot_listen
from control_plane.metrics import system_metrics, vllm_names
from control_plane.metrics.system_metrics import Snapshot

SNAPSHOT_TIMEOUT_S = 5.0
VIEWS = ("motet", "vllm")


class Pages:
    """Renders the two views. render() is called in threads of the port, `take` in the event loop."""

    def __init__(
        self,
        counted: CollectorRegistry,
        take: Callable[[], Snapshot],
        loop: asyncio.AbstractEventLoop,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        self._counted = counted
        self._take = take
        self._loop = loop
        self._wall_clock = wall_clock

    def render(self, accept: str, names: str) -> Page:
        """One page. Raises ValueError for an unknown view, TimeoutError if the event loop does not get to it."""
        if names not in ("", *VIEWS):
            raise ValueError(f"names: {names[:40]!r} is not known; use {' or '.join(VIEWS)}")
        snapshot = asyncio.run_coroutine_threadsafe(self._snapshot(), self._loop).result(SNAPSHOT_TIMEOUT_S)
        counted = list(self._counted.collect())
        if names == "vllm":
            metrics = list(vllm_names.families(snapshot, counted, self._wall_clock()))
        else:
            metrics = [*system_metrics.families(snapshot), *counted]
        encode, content_type = choose_encoder(accept)
        return Page(content_type, encode(_Collected(metrics)))

    async def _snapshot(self) -> Snapshot:
        return self._take()


class _Collected(CollectorRegistry):
    """Metrics that were collected already."""

    def __init__(self, metrics: Sequence[Metric]) -> None:
        super().__init__()
        self._metrics = metrics

    def collect(self) -> Iterable[Metric]:
        return self._metrics


def new_registry() -> CollectorRegistry:
    """With the numbers of this process: memory, CPU time, open files."""
    registry = CollectorRegistry()
    ProcessCollector(registry=registry)
    return registry


def open_port(
    address: str, pages: Pages, is_ready: Callable[[], bool], stack: contextlib.AsyncExitStack
) -> MetricsPort:
    """Serve them until `stack` ends. Raises ValueError, which begins with the flag, if the address cannot be used."""
    try:
        port = MetricsPort(address, pages.render, is_ready)
    except (OSError, ValueError, OverflowError) as error:
        raise ValueError(cannot_listen("--metrics-listen", address, error)) from error
    port.start()
    stack.push_async_callback(asyncio.to_thread, port.close)
    return port
