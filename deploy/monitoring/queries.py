"""What the dashboards show and what the alerts look at. Metrics are those of docs/observability.md."""

from __future__ import annotations

from dataclasses import dataclass, field

RATE = "$__rate_interval"  # Grafana puts four times the scrape interval there


@dataclass(frozen=True, slots=True)
class Query:
    """One line, or one set of lines, of a panel."""

    expression: str
    legend: str


@dataclass(frozen=True, slots=True)
class Panel:
    """A graph over time."""

    title: str
    unit: str  # of Grafana
    queries: tuple[Query, ...]
    description: str = ""


@dataclass(frozen=True, slots=True)
class Dashboard:
    """One page."""

    uid: str
    title: str
    panels: tuple[Panel, ...]


@dataclass(frozen=True, slots=True)
class Alert:
    """Something that a person should look at."""

    name: str
    expression: str
    lasts: str  # how long it must be so
    severity: str
    summary: str
    symptom: str  # heading in docs/observability.md that says what to do
    # A query that has a series whenever the metrics of the expression are there: an alert itself has none.
    evidence: str = field(kw_only=True)
    # Series by name, as promtool writes their values minute by minute: the alert fires on the first, not on the second.
    fires_on: dict[str, str] = field(kw_only=True)
    quiet_on: dict[str, str] = field(kw_only=True)


def quantiles(metric: str) -> tuple[Query, ...]:
    """Median and 99th percentile of a histogram."""
    return tuple(
        Query(f"histogram_quantile({quantile}, sum by (le) (rate({metric}_bucket[{RATE}])))", legend)
        for quantile, legend in ((0.5, "p50"), (0.99, "p99"))
    )


def slowest(metric: str, by: str) -> tuple[Query, ...]:
    """The 99th percentile of a histogram, by a label."""
    inner = f"sum by (le, {by}) (rate({metric}_bucket[{RATE}]))"
    return (Query(f"histogram_quantile(0.99, {inner})", f"p99, {{{{{by}}}}}"),)


def rate(metric: str, by: str = "", legend: str = "") -> Query:
    """Events per second, by a label."""
    inner = f"rate({metric}[{RATE}])"
    return Query(f"sum by ({by}) ({inner})", f"{{{{{by}}}}}") if by else Query(f"sum({inner})", legend)


def total(metric: str, by: str = "", legend: str = "") -> Query:
    """The sum of a gauge, by a label."""
    return Query(f"sum by ({by}) ({metric})", f"{{{{{by}}}}}") if by else Query(f"sum({metric})", legend)


SERVING = Dashboard(
    "motet-serving",
    "Motet: serving",
    (
        Panel("Time to first token", "s", quantiles("motet_time_to_first_token_seconds")),
        Panel("Time per output token", "s", quantiles("motet_time_per_output_token_seconds")),
        Panel("Time in the queue", "s", quantiles("motet_queue_seconds")),
        Panel(
            "Tokens per second",
            "short",
            (
                rate("motet_generated_tokens_total", legend="generated"),
                rate("motet_prompt_tokens_total", legend="prompt"),
                rate("motet_cached_prompt_tokens_total", legend="prompt, from the prefix cache"),
            ),
            "Counted when a request ends.",
        ),
        Panel(
            "Requests",
            "short",
            (
                total("motet_requests_running", legend="running"),
                total("motet_requests_waiting", legend="waiting"),
                total("motet_requests_swapped", legend="swapped out"),
            ),
        ),
        Panel("Requests that ended, per second", "short", (rate("motet_requests_finished_total", "reason"),)),
        Panel("Refused calls per second", "short", (rate("motet_rpc_errors_total", "reason"),)),
        Panel("KV blocks", "short", (total("motet_kv_blocks", "state"),)),
        Panel("Preemptions per second", "short", (rate("motet_preemptions_total", "kind"),)),
        Panel(
            "Prefix cache",
            "percentunit",
            (
                Query(
                    f"sum(rate(motet_prefix_cache_hit_tokens_total[{RATE}])) / "
                    f"sum(rate(motet_prefix_cache_query_tokens_total[{RATE}]))",
                    "prompt tokens found",
                ),
            ),
        ),
        Panel("Step time", "s", quantiles("motet_step_seconds"), "Of the workers that are scraped."),
        Panel("Rows computed per second", "short", (rate("motet_step_rows_total", "phase"),)),
        Panel(
            "Workers",
            "short",
            (total("motet_workers", legend="attached"), rate("motet_migrations_total", legend="migrations per second")),
        ),
        Panel("Round trip to a worker", "s", (total("motet_worker_round_trip_seconds", "worker"),)),
        Panel(
            "Round trip of the plan stream",
            "s",
            quantiles("motet_plan_stream_round_trip_seconds"),
            "Pings to all workers.",
        ),
        Panel(
            "Generated tokens per second by tenant", "short", (rate("motet_tenant_generated_tokens_total", "tenant"),)
        ),
    ),
)

ADAPTERS = Dashboard(
    "motet-adapters",
    "Motet: adapters",
    (
        Panel("Wait for an adapter", "s", quantiles("motet_adapter_wait_seconds"), "Requests with an adapter."),
        Panel(
            "Requests with an adapter, per second",
            "short",
            (
                rate("motet_slot_hits_total", legend="the adapter was in a slot"),
                rate("motet_slot_misses_total", legend="waited for its load"),
            ),
        ),
        Panel(
            "Load into a slot, by source",
            "s",
            slowest("motet_slot_load_seconds", "source"),
            "As workers report it; the source is where the weights were when the load began.",
        ),
        Panel("Bytes loaded into slots, per second", "Bps", (rate("motet_slot_load_bytes_total", "source"),)),
        Panel("Load into the arena", "s", quantiles("motet_adapter_load_seconds"), "Of the workers that are scraped."),
        Panel("Loads per second", "short", (rate("motet_adapter_load_seconds_count", "outcome"),)),
        Panel(
            "Slots, per second",
            "short",
            (
                rate("motet_slot_evictions_total", legend="evictions"),
                rate("motet_slot_load_failures_total", legend="failed loads"),
            ),
        ),
        Panel("Adapters in arenas", "short", (total("motet_adapters_loaded", "worker"),)),
        Panel("Memory of arenas", "bytes", (total("motet_arena_bytes", "state"),)),
        Panel(
            "Host cache",
            "short",
            (
                rate("motet_host_cache_hits_total", legend="hits per second"),
                rate("motet_host_cache_misses_total", legend="misses per second, read from the store"),
                rate("motet_host_cache_corrupt_total", legend="damaged parts per second"),
                rate("motet_host_cache_evictions_total", legend="evictions per second"),
            ),
        ),
        Panel(
            "Memory of the host cache",
            "bytes",
            (total("motet_host_cache_bytes", "state"), total("motet_host_cache_pinned_bytes", legend="pinned")),
        ),
        Panel(
            "Bytes of weights read, per second",
            "Bps",
            (rate("motet_weights_read_bytes_total", "source"),),
            "By the control plane.",
        ),
        Panel("Calls to Redis", "s", slowest("motet_redis_call_seconds", "outcome")),
        Panel("Calls to the artifact store", "s", slowest("motet_store_call_seconds", "kind")),
        Panel(
            "Loads from pinned memory, per second",
            "short",
            (rate("motet_pinned_loads_total", "outcome"),),
            "Of the workers that are scraped and have --pinned-bytes.",
        ),
        Panel("Pinned memory in use", "bytes", (total("motet_pinned_used_bytes", legend="used"),)),
        Panel(
            "Adapters",
            "short",
            (
                total("motet_registry_adapters", legend="names"),
                total("motet_store_adapters", legend="in the store"),
                total("motet_host_cache_adapters", legend="in the host cache"),
            ),
        ),
        Panel("Requests per second by adapter", "short", (rate("motet_adapter_requests_total", "adapter"),)),
        Panel(
            "Tokens per second by adapter",
            "short",
            (rate("motet_adapter_generated_tokens_total", "adapter"),),
        ),
    ),
)

DASHBOARDS = (SERVING, ADAPTERS)

ALERTS = (
    Alert(
        "MotetNoWorker",
        "motet_workers == 0",
        "2m",
        "critical",
        "No worker is attached: requests wait and are refused after --worker-grace-s",
        "workers come and go",
        evidence="motet_workers",
        fires_on={"motet_workers": "0x30"},
        quiet_on={"motet_workers": "1x30"},
    ),
    Alert(
        "MotetFirstTokensSlow",
        "histogram_quantile(0.99, sum by (le) (rate(motet_time_to_first_token_seconds_bucket[5m]))) > 5",
        "10m",
        "warning",
        "One first token in a hundred takes more than 5 s",
        "first tokens are slow",
        evidence="histogram_quantile(0.99, sum by (le) (rate(motet_time_to_first_token_seconds_bucket[5m])))",
        fires_on={
            'motet_time_to_first_token_seconds_bucket{le="1.0"}': "0+1x30",
            'motet_time_to_first_token_seconds_bucket{le="10.0"}': "0+60x30",
            'motet_time_to_first_token_seconds_bucket{le="+Inf"}': "0+60x30",
        },
        quiet_on={
            'motet_time_to_first_token_seconds_bucket{le="1.0"}': "0+60x30",
            'motet_time_to_first_token_seconds_bucket{le="10.0"}': "0+60x30",
            'motet_time_to_first_token_seconds_bucket{le="+Inf"}': "0+60x30",
        },
    ),
    Alert(
        "MotetAdaptersLoadedAgain",
        "sum(rate(motet_host_cache_misses_total[10m])) > 0.5 * sum(rate(motet_host_cache_hits_total[10m])) and "
        "sum(rate(motet_host_cache_misses_total[10m])) > 0.1",
        "15m",
        "warning",
        "Adapters are read from the store again and again: the host cache is too small",
        "adapters are loaded again and again",
        evidence="sum(rate(motet_host_cache_misses_total[10m])) + sum(rate(motet_host_cache_hits_total[10m]))",
        fires_on={"motet_host_cache_misses_total": "0+60x40", "motet_host_cache_hits_total": "0+60x40"},
        quiet_on={"motet_host_cache_misses_total": "0+6x40", "motet_host_cache_hits_total": "0+60x40"},
    ),
    Alert(
        "MotetWorkersComeAndGo",
        "sum(increase(motet_migrations_total[15m])) > 20",
        "0m",
        "warning",
        "More than 20 requests moved to another worker in 15 minutes",
        "workers come and go",
        evidence="sum(increase(motet_migrations_total[15m]))",
        fires_on={"motet_migrations_total": "0+3x30"},
        quiet_on={"motet_migrations_total": "0+0x30"},
    ),
    Alert(
        "MotetQueueFull",
        "sum(rate(motet_requests_rejected_total[5m])) > 0",
        "5m",
        "warning",
        "Requests are refused because a queue is full",
        "requests wait",
        evidence="sum(rate(motet_requests_rejected_total[5m]))",
        fires_on={"motet_requests_rejected_total": "0+1x30"},
        quiet_on={"motet_requests_rejected_total": "7+0x30"},
    ),
    Alert(
        "MotetKvCacheFull",
        "min(motet_kv_cache_usage_ratio) > 0.95 and sum(motet_requests_waiting) > 0",
        "10m",
        "warning",
        "The KV blocks of every worker are held, and requests wait",
        "requests wait",
        evidence="min(motet_kv_cache_usage_ratio) + sum(motet_requests_waiting)",
        fires_on={'motet_kv_cache_usage_ratio{worker="a"}': "0.97x30", "motet_requests_waiting": "4x30"},
        quiet_on={
            'motet_kv_cache_usage_ratio{worker="a"}': "0.97x30",
            'motet_kv_cache_usage_ratio{worker="b"}': "0.5x30",
            "motet_requests_waiting": "4x30",
        },
    ),
    Alert(
        "MotetHostCacheGone",
        "motet_host_cache_available == 0",
        "5m",
        "warning",
        "Redis does not respond: every load reads the store",
        "the host cache is gone",
        evidence="motet_host_cache_available",
        fires_on={"motet_host_cache_available": "0x30"},
        quiet_on={"motet_host_cache_available": "1x30"},
    ),
    Alert(
        "MotetInternalErrors",
        'sum(rate(motet_rpc_errors_total{reason="INTERNAL"}[5m])) > 0',
        "5m",
        "critical",
        "Calls end with errors of the server itself; its log has the correlation ids",
        "clients get errors",
        evidence="sum(rate(motet_rpc_errors_total[5m]))",
        fires_on={'motet_rpc_errors_total{reason="INTERNAL"}': "0+1x30"},
        quiet_on={'motet_rpc_errors_total{reason="ADAPTER_NOT_FOUND"}': "0+1x30"},
    ),
    Alert(
        "MotetRowsNotFinite",
        "sum(rate(motet_step_failed_rows_total[5m])) > 0",
        "0m",
        "warning",
        "Logits were not finite: an adapter or the base model is broken",
        "clients get errors",
        evidence="sum(rate(motet_step_failed_rows_total[5m]))",
        fires_on={"motet_step_failed_rows_total": "0+1x30"},
        quiet_on={"motet_step_failed_rows_total": "3+0x30"},
    ),
)
