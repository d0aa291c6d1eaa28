"""What is counted of requests that ended: times, tokens, reasons, adapters, tenants. Nothing is counted for each token.

Requests are counted together: about 20 calls into the library take four times as long where each of them comes alone
between other work, out of the caches of the processor.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter, Histogram

from control_plane.metrics.bounded_labels import BoundedLabels
from control_plane.observers.ended_request import EndedRequest

MAX_LABELS = 64  # adapters, and tenants, with series of their own
IDLE_S = 600.0
REQUESTS_AT_ONCE = 32  # counted together, unless a page is read before
BASE_MODEL = "_base"

# Those that OpenTelemetry's conventions for generative models recommend for these three, seconds.
FIRST_TOKEN_BUCKETS = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 30.0, 60.0),
)
OUTPUT_TOKEN_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5)
DURATION_BUCKETS = (
    *(0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28, 2.56, 5.12, 10.24, 20.48, 40.96, 81.92, 163.84, 327.68, 655.36),
)
QUEUE_BUCKETS = (0.0005, 0.001, 0.005, 0.01, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)


class RequestMetrics:
    """Counters and histograms in a registry of prometheus_client. Called in the event loop."""

    is_on = True

    def __init__(self, registry: CollectorRegistry, clock: Callable[[], float] = time.monotonic) -> None:
        self._uncounted: list[EndedRequest] = []
        self._finished = Counter(
            "motet_requests_finished",
            "Completions by how they ended, and requests by the error.",
            ["reason"],
            registry=registry,
        )
        self._errors = Counter(
            "motet_rpc_errors", "Calls that ended with an error, by reason.", ["reason"], registry=registry
        )
        self._queue = Histogram(
            "motet_queue_seconds", "From arrival to the first step.", buckets=QUEUE_BUCKETS, registry=registry
        )
        self._adapter_wait = Histogram(
            "motet_adapter_wait_seconds",
            "Of the time in the queue, from arrival until the adapter was in a slot; 0 where it was.",
            buckets=QUEUE_BUCKETS,
            registry=registry,
        )
        self._slot_hits = Counter(
            "motet_slot_hits", "Requests whose adapters were in slots when they came.", registry=registry
        )
        self._slot_misses = Counter(
            "motet_slot_misses", "Requests that waited for an adapter to be loaded.", registry=registry
        )
        self._first_token = Histogram(
            "motet_time_to_first_token_seconds",
            "From arrival to the first token.",
            buckets=FIRST_TOKEN_BUCKETS,
            registry=registry,
        )
        self._output_token = Histogram(
            "motet_time_per_output_token_seconds",
            "The mean time between two tokens of a completion, of each request.",
            buckets=OUTPUT_TOKEN_BUCKETS,
            registry=registry,
        )
        self._duration = Histogram(
            "motet_request_duration_seconds", "From arrival to the end.", buckets=DURATION_BUCKETS, registry=registry
        )
        self._prompt_tokens = Counter("motet_prompt_tokens", "Prompt tokens of ended requests.", registry=registry)
        self._cached_tokens = Counter(
            "motet_cached_prompt_tokens",
            "Prompt tokens of ended requests that the prefix cache had.",
            registry=registry,
        )
        self._generated_tokens = Counter(
            "motet_generated_tokens", "Generated tokens of ended requests.", registry=registry
        )
        self._by_adapter = _ByLabel("adapter", registry, clock)
        self._by_tenant = _ByLabel("tenant", registry, clock)

    def ended(self, request: EndedRequest) -> None:
        """Count one, at the latest with the next page."""
        self._uncounted.append(request)
        if len(self._uncounted) >= REQUESTS_AT_ONCE:
            self.count()

    def count(self) -> None:
        """Count those that ended and are not counted yet: to be called before a page is made."""
        for request in self._uncounted:
            self._count(request)
        self._uncounted.clear()

    def _count(self, request: EndedRequest) -> None:
        for reason in request.reasons:
            self._finished.labels(reason).inc()
        if request.queue_s is not None:
            self._queue.observe(request.queue_s)
        if request.adapter_wait_s is not None:
            self._adapter_wait.observe(request.adapter_wait_s)
            (self._slot_misses if request.adapter_wait_s else self._slot_hits).inc()
        self._duration.observe(request.total_s)
        if request.first_token_s is not None:
            self._first_token.observe(request.first_token_s)
            num_intervals = request.num_generated_tokens / max(len(request.reasons), 1) - 1
            if num_intervals > 0:
                self._output_token.observe((request.total_s - request.first_token_s) / num_intervals)
        self._prompt_tokens.inc(request.num_prompt_tokens)
        self._cached_tokens.inc(request.num_cached_tokens)
        self._generated_tokens.inc(request.num_generated_tokens)
        for adapter in request.adapters or (BASE_MODEL,):
            self._by_adapter.count(adapter, request)
        self._by_tenant.count(request.tenant, request)

    def refused(self, reason: str) -> None:
        """Count one."""
        self._errors.labels(reason).inc()


class _ByLabel:
    """Requests and tokens by adapter, or by tenant."""

    def __init__(self, label: str, registry: CollectorRegistry, clock: Callable[[], float]) -> None:
        self._requests = Counter(f"motet_{label}_requests", f"Ended requests by {label}.", [label], registry=registry)
        self._prompt_tokens = Counter(
            f"motet_{label}_prompt_tokens", f"Prompt tokens of ended requests by {label}.", [label], registry=registry
        )
        self._generated_tokens = Counter(
            f"motet_{label}_generated_tokens",
            f"Generated tokens of ended requests by {label}.",
            [label],
            registry=registry,
        )
        # Invariant: for the labels that have series. Finding them by `labels()` takes longer than counting.
        self._series: dict[str, tuple[Counter, Counter, Counter]] = {}
        self._labels = BoundedLabels(MAX_LABELS, IDLE_S, clock, self._remove)

    def count(self, value: str, request: EndedRequest) -> None:
        """One request of that adapter or tenant."""
        label = self._labels.label(value)
        series = self._series.get(label)
        if series is None:
            series = self._series[label] = (
                self._requests.labels(label),
                self._prompt_tokens.labels(label),
                self._generated_tokens.labels(label),
            )
        requests, prompt_tokens, generated_tokens = series
        requests.inc()
        prompt_tokens.inc(request.num_prompt_tokens)
        generated_tokens.inc(request.num_generated_tokens)

    def _remove(self, value: str) -> None:
        del self._series[value]
        for counter in (self._requests, self._prompt_tokens, self._generated_tokens):
            counter.remove(value)
