"""The pages of a scrape, from a snapshot to text that Prometheus reads."""

from __future__ import annotations

import asyncio
import re
import urllib.error
import urllib.request
from collections.abc import AsyncIterator

import pytest
from motet.v1 import status_pb2
from prometheus_client import CollectorRegistry
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families as parse_text

from contract.metrics.port import MetricsPort
from control_plane.metrics.port import Pages
from control_plane.metrics.request_metrics import RequestMetrics
from control_plane.metrics.system_metrics import MAX_LOADED_SERIES, CacheCounts, LoadedAdapter, Snapshot
from control_plane.observers.ended_request import EndedRequest

WORKER = status_pb2.WorkerStatus(
    worker_id="w0",
    device="cpu",
    num_running=3,
    num_blocks=100,
    num_blocks_held=25,
    num_blocks_cached=15,
    block_size=16,
    arena_bytes=1000,
    arena_used_bytes=300,
    num_preemptions=5,
    num_swapped_out=2,
    step_time_ms=4.0,
    prefix_query_tokens=50,
    prefix_hit_tokens=20,
)
STATUS = status_pb2.GetStatusResponse(
    server_version="0.1.0",
    model=status_pb2.ModelStatus(name="base", fingerprint="ab" * 32, dtype="float32", max_model_len=512),
    workers=[WORKER],
    queues=status_pb2.QueueStatus(num_requests=4, num_waiting=1, num_running=3, num_accepted=9),
    adapters=status_pb2.AdapterStatus(
        num_registered=7, num_stored=8, num_host_cached=2, host_cache_bytes=10, host_cache_budget_bytes=100
    ),
    audit=status_pb2.AuditStatus(is_on=True, num_lines=3),
)
LOADED = (LoadedAdapter("legal", "cd" * 32, "w0", True), LoadedAdapter("tax", "ef" * 32, "w0", False))
SNAPSHOT = Snapshot(STATUS, CacheCounts(6, 1, 0), LOADED, 16)


class Shown:
    """A port that shows a snapshot."""

    def __init__(self) -> None:
        registry = CollectorRegistry()
        self.requests = RequestMetrics(registry)
        self.snapshot = SNAPSHOT
        self.is_ready = True
        pages = Pages(registry, self._take, asyncio.get_running_loop(), wall_clock=lambda: 1000.0)
        self._port = MetricsPort("127.0.0.1:0", pages.render, lambda: self.is_ready)
        self._port.start()

    def _take(self) -> Snapshot:
        self.requests.count()
        return self.snapshot

    async def get(self, path: str, accept: str = "") -> tuple[int, str, str]:
        """Status, content type and text."""

        def read() -> tuple[int, str, str]:
            request = urllib.request.Request(f"http://{self._port.address}{path}", headers={"Accept": accept})
            try:
                with urllib.request.urlopen(request) as response:
                    return response.status, response.headers["Content-Type"], response.read().decode()
            except urllib.error.HTTPError as error:
                with error:
                    return error.code, error.headers["Content-Type"], error.read().decode()

        return await asyncio.to_thread(read)

    async def close(self) -> None:
        await asyncio.to_thread(self._port.close)


@pytest.fixture
async def shown() -> AsyncIterator[Shown]:
    shown = Shown()
    yield shown
    await shown.close()


def samples(text: str) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in parse_text(text)
        for sample in family.samples
    }


async def test_the_system_and_what_was_counted(shown: Shown) -> None:
    shown.requests.ended(EndedRequest("acme", ["legal"], ["length"], 10, 4, 5, 0.01, 0.1, 0.5))
    status, content_type, text = await shown.get("/metrics")
    assert status == 200 and content_type.startswith("text/plain; version=")
    found = samples(text)
    for name, labels, value in (
        ("motet_requests_waiting", {}, 1),
        ("motet_requests_accepted_total", {}, 9),
        ("motet_workers", {}, 1),
        ("motet_kv_blocks", {"worker": "w0", "state": "free"}, 60),
        ("motet_kv_cache_usage_ratio", {"worker": "w0"}, 0.25),
        ("motet_arena_bytes", {"worker": "w0", "state": "free"}, 700),
        ("motet_preemptions_total", {"worker": "w0", "kind": "recompute"}, 3),
        ("motet_worker_step_seconds", {"worker": "w0"}, 0.004),
        ("motet_prefix_cache_hit_tokens_total", {"worker": "w0"}, 20),
        ("motet_registry_adapters", {}, 7),
        ("motet_host_cache_bytes", {"state": "free"}, 90),
        ("motet_host_cache_hits_total", {}, 6),
        ("motet_adapter_loaded", {"adapter": "legal", "digest": "cd" * 6, "worker": "w0", "pinned": "true"}, 1),
        ("motet_audit_writable", {}, 1),
        ("motet_generated_tokens_total", {}, 5),
        ("motet_adapter_requests_total", {"adapter": "legal"}, 1),
    ):
        assert found[(name, tuple(sorted(labels.items())))] == value, name


async def test_every_metric_has_a_name_a_unit_and_a_help_text_as_prometheus_wants_them(shown: Shown) -> None:
    _, content_type, text = await shown.get("/metrics", "application/openmetrics-text; version=1.0.0")
    assert content_type.startswith("application/openmetrics-text")
    families = list(parse_openmetrics(text))
    ours = [family for family in families if family.name.startswith("motet_")]
    assert len(ours) > 30
    for family in ours:
        assert family.documentation.endswith("."), family.name
        assert re.fullmatch(r"motet_[a-z_]+", family.name)
        assert not re.search(r"(_ms|_us|_count|_milliseconds)$", family.name), family.name
    others = {family.name for family in families} - {family.name for family in ours}
    assert all(name.startswith("process_") for name in others)


async def test_the_view_for_routers_has_residency_and_their_names(shown: Shown) -> None:
    shown.requests.ended(EndedRequest("acme", ["legal"], ["stop_token", "stop_string"], 10, 4, 5, 0.01, 0.1, 0.5))
    _, _, text = await shown.get("/metrics?names=vllm")
    found = samples(text)
    model = (("model_name", "base"),)
    assert found["vllm:num_requests_running", model] == 3
    assert found["vllm:num_requests_waiting", model] == 1
    assert found["vllm:kv_cache_usage_perc", model] == 0.25
    assert found["vllm:cache_config_info", (("block_size", "16"), ("num_gpu_blocks", "100"))] == 1
    residency = {"max_lora": "16", "running_lora_adapters": "legal,tax", "waiting_lora_adapters": ""}
    assert found["vllm:lora_requests_info", tuple(sorted(residency.items()))] == 1000.0
    loaded = {"adapter_name": "legal", "level": "gpu", "pinned": "true"}
    assert found["vllm:lora_adapter_loaded", tuple(sorted(loaded.items()))] == 1
    assert found["vllm:time_to_first_token_seconds_count", model] == 1
    assert found["vllm:generation_tokens_total", model] == 5
    assert found["vllm:request_success_total", (("finished_reason", "stop"), *model)] == 2
    assert not [name for name, _ in found if name.startswith("motet_")]


async def test_no_worker_and_many_adapters(shown: Shown) -> None:
    empty = status_pb2.GetStatusResponse()
    shown.snapshot = Snapshot(empty, CacheCounts(0, 0, 0), (), 0)
    for path in ("/metrics", "/metrics?names=vllm"):
        status, _, _ = await shown.get(path)
        assert status == 200
    many = tuple(LoadedAdapter(f"a{number:04}", f"{number:064x}", "w0", False) for number in range(2000))
    shown.snapshot = Snapshot(STATUS, CacheCounts(0, 0, 0), many, 2000)
    _, _, text = await shown.get("/metrics")
    assert text.count("motet_adapter_loaded{") == MAX_LOADED_SERIES


async def test_health_readiness_and_wrong_paths(shown: Shown) -> None:
    assert (await shown.get("/healthz"))[0] == 200
    assert (await shown.get("/readyz"))[0] == 200
    shown.is_ready = False
    assert (await shown.get("/readyz"))[0] == 503
    assert (await shown.get("/healthz"))[0] == 200
    assert (await shown.get("/metrics?names=prom"))[::2] == (400, "names: 'prom' is not known; use motet or vllm\n")
    assert (await shown.get("/"))[0] == 404
