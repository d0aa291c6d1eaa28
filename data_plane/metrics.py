"""The worker's metrics for Prometheus: steps by kind, what they computed, loads of adapters.

Between two steps only a few numbers are put aside. A counter of the library is a call into code that the step has
driven out of the caches of the processor, and takes ten times as long there as in a loop.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from typing import NamedTuple, Protocol

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector

from contract.metrics.buckets import LOAD_BUCKETS
from contract.metrics.port import MetricsPort, Page, cannot_listen
from data_plane.plan import Engine, StepOutput, StepPlan

STEP_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
STEPS_AT_ONCE = 64  # counted together, unless a page is read before


class TierStats(Protocol):
    """What is shown of adapters in host memory (data_plane.adapters.format.host_tier.HostTierStats)."""

    @property
    def num_hits(self) -> int: ...
    @property
    def num_misses(self) -> int: ...
    @property
    def used_bytes(self) -> int: ...


class _TierCollector(Collector):
    def __init__(self, stats: Callable[[], TierStats]) -> None:
        self._stats = stats

    def collect(self) -> Iterator[Metric]:
        stats = self._stats()
        loads = CounterMetricFamily(
            "motet_pinned_loads", "Loads by whether host memory had the adapter.", labels=["outcome"]
        )
        loads.add_metric(["hit"], stats.num_hits)
        loads.add_metric(["miss"], stats.num_misses)
        yield loads
        yield GaugeMetricFamily("motet_pinned_used_bytes", "Host memory with adapters in use.", stats.used_bytes)


class _Step(NamedTuple):
    """What is counted of one step."""

    step_time_us: int
    num_prefills: int
    num_prefill_tokens: int
    num_decoded: int
    num_failed: int
    num_waiting: int
    num_drafted: int
    num_accepted: int
    num_moved_blocks: int
    move_time_us: int


class WorkerMetrics:
    """on_step() belongs to the compute thread, on_load() to loaders; pages are rendered in threads of the port."""

    def __init__(self, engine: Engine, tier_stats: Callable[[], TierStats] | None = None) -> None:
        """`tier_stats`: of the adapters that the worker keeps in host memory; None if it keeps none."""
        self._uncounted: deque[_Step] = deque()
        self._registry = registry = CollectorRegistry()
        ProcessCollector(registry=registry)
        self._steps = {
            kind: family.labels(kind)
            for family in [
                Histogram("motet_step_seconds", "Steps by kind.", ["kind"], buckets=STEP_BUCKETS, registry=registry)
            ]
            for kind in ("decode", "prefill", "mixed", "empty")
        }
        rows = Counter("motet_step_rows", "Rows that steps computed, by phase.", ["phase"], registry=registry)
        tokens = Counter("motet_step_tokens", "Tokens that steps computed, by phase.", ["phase"], registry=registry)
        self._rows = {phase: rows.labels(phase) for phase in ("decode", "prefill")}
        self._tokens = {phase: tokens.labels(phase) for phase in ("decode", "prefill")}
        self._failed_rows = Counter(
            "motet_step_failed_rows", "Rows whose logits or vectors were not finite.", registry=registry
        )
        self._drafted = Counter("motet_drafted_tokens", "Draft tokens that steps verified.", registry=registry)
        self._accepted = Counter("motet_accepted_tokens", "Draft tokens that were accepted.", registry=registry)
        self._waiting_rows = Counter(
            "motet_step_waiting_rows", "Rows that sat out a step: their masks were not ready.", registry=registry
        )
        self._moved_blocks = Counter(
            "motet_moved_kv_blocks", "KV blocks moved to and from host memory.", registry=registry
        )
        self._move_time = Counter("motet_move_seconds", "Time of these moves.", registry=registry)
        loads = Histogram(
            "motet_adapter_load_seconds",
            "Loads of adapters into the arena, reading included.",
            ["outcome"],
            buckets=LOAD_BUCKETS,
            registry=registry,
        )
        self._loads = {outcome: loads.labels(outcome) for outcome in ("ready", "failed")}
        used = Gauge("motet_worker_arena_used_bytes", "Memory for adapters in use.", registry=registry)
        used.set_function(engine.slots.used_bytes)
        if tier_stats is not None:
            registry.register(_TierCollector(tier_stats))

    def on_step(self, plan: StepPlan, output: StepOutput) -> None:
        """A step was executed."""
        num_prefills, num_prefill_tokens = len(plan.prefills), 0
        num_failed, num_waiting = len(output.failed_rows), len(output.waiting_rows)
        num_decoded = len(output.rows) + num_failed + num_waiting
        if num_prefills:
            rows, tokens = zip(*plan.prefills.tolist(), strict=True)
            prefilled, num_prefill_tokens = set(rows), sum(tokens)
            for ended in (output.rows, output.failed_rows, output.waiting_rows):
                num_decoded -= len(prefilled.intersection(ended.tolist()))
        self._uncounted.append(
            _Step(
                output.step_time_us,
                num_prefills,
                num_prefill_tokens,
                num_decoded,
                num_failed,
                num_waiting,
                output.num_drafted,
                output.num_accepted,
                output.num_moved_blocks,
                output.move_time_us,
            )
        )
        if len(self._uncounted) >= STEPS_AT_ONCE:
            self._count()

    def _count(self) -> None:
        """Count what was put aside. Called by several threads: each step is taken by one of them."""
        while True:
            try:
                step = self._uncounted.popleft()
            except IndexError:
                return
            self._count_step(step)

    def _count_step(self, step: _Step) -> None:
        kind = "mixed" if step.num_decoded else "prefill"
        if not step.num_prefills:
            kind = "decode" if step.num_decoded else "empty"
        self._steps[kind].observe(step.step_time_us / 1e6)
        if step.num_decoded:
            self._rows["decode"].inc(step.num_decoded)
            self._tokens["decode"].inc(step.num_decoded)
        if step.num_prefills:
            self._rows["prefill"].inc(step.num_prefills)
            self._tokens["prefill"].inc(step.num_prefill_tokens)
        if step.num_failed:
            self._failed_rows.inc(step.num_failed)
        if step.num_drafted:
            self._drafted.inc(step.num_drafted)
            self._accepted.inc(step.num_accepted)
        if step.num_waiting:
            self._waiting_rows.inc(step.num_waiting)
        if step.num_moved_blocks:
            self._moved_blocks.inc(step.num_moved_blocks)
            self._move_time.inc(step.move_time_us / 1e6)

    def on_load(self, seconds: float, is_ready: bool) -> None:
        """A load of an adapter ended."""
        self._loads["ready" if is_ready else "failed"].observe(seconds)

    def open_port(self, address: str, is_ready: Callable[[], bool]) -> MetricsPort:
        """Serve them. Raises ValueError, which begins with the flag, if the address cannot be used."""

        def render(accept: str, names: str) -> Page:
            if names not in ("", "motet"):
                raise ValueError(f"names: {names[:40]!r} is not known; a worker has its own names only")
            self._count()
            encode, content_type = choose_encoder(accept)
            return Page(content_type, encode(self._registry))

        try:
            port = MetricsPort(address, render, is_ready)
        except (OSError, ValueError, OverflowError) as error:
            raise ValueError(cannot_listen("--worker-metrics-listen", address, error)) from error
        port.start()
        return port
