"""The same numbers under the names that routers, autoscalers and dashboards of the field read: `vllm:*`.

`vllm:lora_requests_info` lists the adapters that lie in an arena, as its readers take it: they send an adapter's
requests where it is loaded, whether or not it has requests at this moment.
"""

from __future__ import annotations

from collections.abc import Iterable

from prometheus_client import Metric
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.samples import Sample

from control_plane.metrics.system_metrics import Snapshot

_HISTOGRAMS = {  # ours: theirs
    "motet_time_to_first_token_seconds": "vllm:time_to_first_token_seconds",
    "motet_time_per_output_token_seconds": "vllm:inter_token_latency_seconds",
    "motet_request_duration_seconds": "vllm:e2e_request_latency_seconds",
    "motet_queue_seconds": "vllm:request_queue_time_seconds",
}
_COUNTERS = {"motet_prompt_tokens": "vllm:prompt_tokens", "motet_generated_tokens": "vllm:generation_tokens"}
_FINISHED = {"length": "length", "stop_token": "stop", "stop_string": "stop"}


def families(snapshot: Snapshot, counted: Iterable[Metric], now_s: float) -> Iterable[Metric]:
    """Every metric of this view. `counted`: what RequestMetrics counts; `now_s`: the time, Unix seconds."""
    model = snapshot.status.model.name
    yield from _system(snapshot, model)
    yield from _adapters(snapshot, now_s)
    for metric in counted:
        if (name := (_HISTOGRAMS | _COUNTERS).get(metric.name)) is not None:
            yield _renamed(metric, name, model)
        elif metric.name == "motet_requests_finished":
            yield _successes(metric, model)


def _system(snapshot: Snapshot, model: str) -> Iterable[Metric]:
    status, workers = snapshot.status, snapshot.status.workers
    num_blocks = sum(worker.num_blocks for worker in workers)
    usage = sum(worker.num_blocks_held for worker in workers) / num_blocks if num_blocks else 0.0
    for name, text, value in (
        ("vllm:num_requests_running", "Requests that are computed.", status.queues.num_running),
        ("vllm:num_requests_waiting", "Requests that wait to run.", status.queues.num_waiting),
        ("vllm:kv_cache_usage_perc", "Part of the KV blocks that requests hold, from 0 to 1.", usage),
        ("vllm:gpu_cache_usage_perc", "The same as vllm:kv_cache_usage_perc, under an earlier name.", usage),
    ):
        gauge = GaugeMetricFamily(name, text, labels=["model_name"])
        gauge.add_metric([model], value)
        yield gauge
    config = GaugeMetricFamily(
        "vllm:cache_config_info", "Sizes of the KV cache.", labels=["block_size", "num_gpu_blocks"]
    )
    config.add_metric([str(workers[0].block_size if workers else 0), str(num_blocks)], 1)
    yield config
    for name, text, attribute in (
        ("vllm:prefix_cache_queries", "Prompt tokens looked up in the prefix cache.", "prefix_query_tokens"),
        ("vllm:prefix_cache_hits", "Prompt tokens found in the prefix cache.", "prefix_hit_tokens"),
        ("vllm:num_preemptions", "Requests that gave up their KV blocks.", "num_preemptions"),
    ):
        counter = CounterMetricFamily(name, text, labels=["model_name"])
        counter.add_metric([model], sum(getattr(worker, attribute) for worker in workers))
        yield counter


def _adapters(snapshot: Snapshot, now_s: float) -> Iterable[Metric]:
    names = sorted({each.adapter for each in snapshot.loaded})
    info = GaugeMetricFamily(
        "vllm:lora_requests_info",
        "When the list was made, Unix seconds.",
        labels=["max_lora", "running_lora_adapters", "waiting_lora_adapters"],
    )
    info.add_metric([str(max(len(names), snapshot.max_loaded)), ",".join(names), ""], now_s)
    yield info
    loaded = GaugeMetricFamily(
        "vllm:lora_adapter_loaded", "1 for an adapter in an arena.", labels=["adapter_name", "level", "pinned"]
    )
    pinned = {each.adapter for each in snapshot.loaded if each.is_pinned}
    for name in names:
        loaded.add_metric([name, "gpu", str(name in pinned).lower()], 1)
    yield loaded
    yield GaugeMetricFamily("vllm:num_gpu_loaded_lora_adapters", "Adapters in arenas.", value=len(names))


def _renamed(metric: Metric, name: str, model: str) -> Metric:
    renamed = Metric(name, metric.documentation, metric.type)
    renamed.samples = [
        sample._replace(name=sample.name.replace(metric.name, name, 1), labels={"model_name": model, **sample.labels})
        for sample in metric.samples
        if not sample.name.endswith("_created")
    ]
    return renamed


def _successes(metric: Metric, model: str) -> Metric:
    counts: dict[str, float] = {}
    for sample in metric.samples:
        if sample.name.endswith("_total") and sample.labels["reason"] in _FINISHED:
            reason = _FINISHED[sample.labels["reason"]]
            counts[reason] = counts.get(reason, 0.0) + sample.value
    successes = Metric("vllm:request_success", "Completions by how they ended.", "counter")
    successes.samples = [
        Sample("vllm:request_success_total", {"model_name": model, "finished_reason": reason}, count)
        for reason, count in sorted(counts.items())
    ]
    return successes
