"""What is counted as requests end."""

from __future__ import annotations

from dataclasses import replace

from prometheus_client import CollectorRegistry

from control_plane.metrics.bounded_labels import OTHER
from control_plane.metrics.request_metrics import MAX_LABELS, REQUESTS_AT_ONCE, RequestMetrics
from control_plane.observers.ended_request import EndedRequest

REQUEST = EndedRequest(
    tenant="acme",
    adapters=["legal"],
    reasons=["length"],
    num_prompt_tokens=10,
    num_cached_tokens=4,
    num_generated_tokens=5,
    queue_s=0.002,
    first_token_s=0.1,
    total_s=0.5,
)


def test_one_request_is_counted_once_everywhere() -> None:
    registry = CollectorRegistry()
    metrics = RequestMetrics(registry)
    metrics.ended(REQUEST)
    metrics.count()
    value = registry.get_sample_value
    assert value("motet_requests_finished_total", {"reason": "length"}) == 1
    assert value("motet_prompt_tokens_total") == 10
    assert value("motet_cached_prompt_tokens_total") == 4
    assert value("motet_generated_tokens_total") == 5
    assert value("motet_queue_seconds_sum") == 0.002
    assert value("motet_time_to_first_token_seconds_sum") == 0.1
    assert value("motet_time_per_output_token_seconds_sum") == 0.1, "0.4 s for the four tokens after the first"
    assert value("motet_request_duration_seconds_count") == 1
    for label, name in (("adapter", "legal"), ("tenant", "acme")):
        assert value(f"motet_{label}_requests_total", {label: name}) == 1
        assert value(f"motet_{label}_prompt_tokens_total", {label: name}) == 10
        assert value(f"motet_{label}_generated_tokens_total", {label: name}) == 5


def test_base_model_several_adapters_and_several_completions() -> None:
    registry = CollectorRegistry()
    metrics = RequestMetrics(registry)
    metrics.ended(replace(REQUEST, adapters=[]))
    metrics.ended(
        replace(REQUEST, adapters=["legal", "tax"], reasons=["length", "stop_token"], num_generated_tokens=10)
    )
    metrics.count()
    value = registry.get_sample_value
    assert [value("motet_adapter_requests_total", {"adapter": name}) for name in ("_base", "legal", "tax")] == [1, 1, 1]
    assert value("motet_requests_finished_total", {"reason": "stop_token"}) == 1
    assert value("motet_time_per_output_token_seconds_sum") == 0.2, "two completions of five tokens side by side"


def test_a_request_that_never_ran_has_no_times_but_its_duration() -> None:
    registry = CollectorRegistry()
    metrics = RequestMetrics(registry)
    metrics.ended(replace(REQUEST, queue_s=None, first_token_s=None, num_generated_tokens=0, reasons=["NO_WORKER"]))
    metrics.refused("QUEUE_FULL")
    metrics.count()
    value = registry.get_sample_value
    assert value("motet_queue_seconds_count") == value("motet_time_to_first_token_seconds_count") == 0
    assert value("motet_request_duration_seconds_count") == 1
    assert value("motet_requests_finished_total", {"reason": "NO_WORKER"}) == 1
    assert value("motet_rpc_errors_total", {"reason": "QUEUE_FULL"}) == 1


def test_requests_are_counted_together_and_none_twice() -> None:
    registry = CollectorRegistry()
    metrics = RequestMetrics(registry)

    def counted() -> float | None:
        return registry.get_sample_value("motet_request_duration_seconds_count")

    for _ in range(REQUESTS_AT_ONCE - 1):
        metrics.ended(REQUEST)
    assert counted() == 0
    metrics.ended(REQUEST)
    assert counted() == REQUESTS_AT_ONCE, "so that they do not pile up where nobody reads pages"
    metrics.ended(REQUEST)
    for _ in range(2):
        metrics.count()
        assert counted() == REQUESTS_AT_ONCE + 1


def test_ten_thousand_tenants_make_a_bounded_number_of_series_and_every_request_is_in_one() -> None:
    registry = CollectorRegistry()
    metrics = RequestMetrics(registry, clock=lambda: 0.0)
    for number in range(10_000):
        metrics.ended(replace(REQUEST, tenant=f"tenant-{number}", adapters=[f"adapter-{number}"]))
    metrics.count()
    for label in ("tenant", "adapter"):
        [family] = [each for each in registry.collect() if each.name == f"motet_{label}_requests"]
        samples = {s.labels[label]: s.value for s in family.samples if s.name.endswith("_total")}
        assert len(samples) == MAX_LABELS + 1
        assert sum(samples.values()) == 10_000
        assert samples[OTHER] == 10_000 - MAX_LABELS
