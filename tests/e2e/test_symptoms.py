"""Each symptom of the runbook in docs/observability.md is provoked here, and the metric that it names shows it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest
from motet import Client, NotFound

from tests.e2e.harness import ROOT, System, wait_until
from tests.e2e.test_metrics import Watched, free_address
from tests.e2e.traffic import Job, ask_all
from tests.makers import make_adapter, make_checkpoint

RUNBOOK = (ROOT / "docs" / "observability.md").read_text("utf-8").split("## Runbook")[1].split("\n## ")[0]
NUM_ADAPTERS = 4
STEP = ["--step-time-ms", "5"]


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("model"), arch="llama")


@pytest.fixture(scope="module")
def adapters(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    directory = tmp_path_factory.mktemp("adapters")
    return {
        f"a{seed}": make_adapter(directory / f"a{seed}", model_dir, rank=4, alpha=8, targets=["q_proj"], seed=seed)
        for seed in range(NUM_ADAPTERS)
    }


@contextmanager
def watching(model_dir: Path, tmp_path: Path, *flags: str) -> Iterator[tuple[Watched, Client]]:
    """A system without workers, its metrics, and a client."""
    address = free_address()
    with System(model_dir, tmp_path, control_flags=["--metrics-listen", address, *flags]) as system:
        yield Watched(system, address), system.client()


def test_first_tokens_are_slow_because_requests_queue(model_dir: Path, tmp_path: Path) -> None:
    with watching(model_dir, tmp_path) as (watched, client):
        watched.system.start_hash_worker("w0", [*STEP, "--max-rows", "1"])
        ask_all(client, [Job((9, 10, 11), "", 20)] * 8)
        wait_until(lambda: watched.value("motet_queue_seconds_count") == 8, "all are counted")
        queued_s = watched.value("motet_queue_seconds_sum")
        assert queued_s > 0.8 * watched.value("motet_time_to_first_token_seconds_sum"), "most of it was the queue"


def test_requests_wait_because_the_kv_cache_is_full(model_dir: Path, tmp_path: Path) -> None:
    with watching(model_dir, tmp_path) as (watched, client), ThreadPoolExecutor(1) as pool:
        watched.system.start_hash_worker("w0", [*STEP, "--num-blocks", "24", "--block-size", "16"])
        # Each has room alone, and all together have not.
        load = pool.submit(ask_all, client, [Job(tuple(range(20, 60)), "", 200)] * 12)
        wait_until(lambda: watched.value("motet_requests_waiting") > 0, "requests wait")
        wait_until(lambda: watched.value("motet_kv_cache_usage_ratio") > 0.9, "the blocks are held")
        assert len(load.result(timeout=120)) == 12
        assert watched.value("motet_preemptions_total") > 0


def test_first_tokens_of_adapters_are_slow_and_adapters_are_loaded_again_and_again(
    model_dir: Path, tmp_path: Path, adapters: dict[str, Path]
) -> None:
    """One slot for four adapters, and a host cache that holds one of them."""
    with watching(model_dir, tmp_path, "--host-cache-bytes", "8KiB") as (watched, client):
        watched.system.start_hash_worker("w0", [*STEP, "--num-slots", "1"])
        for name, directory in adapters.items():
            client.adapters.register(name, directory)
        registered = watched.value("motet_host_cache_misses_total")
        # One after the other: requests that wait together for an adapter share its load.
        ask_all(client, [Job((9, 10, 11), name, 10) for name in adapters] * 3, num_threads=1)
        wait_until(lambda: watched.value("motet_adapter_wait_seconds_count") == 12, "all are counted")
        assert watched.value("motet_adapter_wait_seconds_sum") > 0, "they waited for loads"
        num_reads = watched.value("motet_host_cache_misses_total") - registered
        assert num_reads > NUM_ADAPTERS, "the store was read again and again"
        assert watched.value("motet_adapters_loaded") == 1
        assert watched.value("motet_slot_misses_total") > NUM_ADAPTERS, "requests waited for loads again and again"
        assert watched.value("motet_slot_evictions_total") > NUM_ADAPTERS
        assert watched.value("motet_slot_load_seconds_count", source="store") > NUM_ADAPTERS
        assert watched.value("motet_slot_hits_total") + watched.value("motet_slot_misses_total") == 12


def test_the_store_is_slow(model_dir: Path, tmp_path: Path, adapters: dict[str, Path]) -> None:
    """Its time is measured for every call, so that a slow one is seen; a test cannot slow a disk down."""
    with watching(model_dir, tmp_path, "--host-cache", "memory") as (watched, client):
        watched.system.start_hash_worker("w0", STEP)
        num_before = watched.value("motet_store_call_seconds_count", kind="change")
        client.adapters.register("a0", adapters["a0"])
        ask_all(client, [Job((9, 10, 11), "a0", 5)])
        assert watched.value("motet_store_call_seconds_count", kind="change") > num_before
        assert watched.value("motet_store_call_seconds_sum") > 0
        wait_until(lambda: watched.value("motet_slot_load_bytes_total") > 0, "the load is counted")


def test_workers_come_and_go(model_dir: Path, tmp_path: Path) -> None:
    with watching(model_dir, tmp_path) as (watched, client), ThreadPoolExecutor(1) as pool:
        watched.system.start_hash_worker("w0", STEP)
        load = pool.submit(ask_all, client, [Job((9, 10, 11), "", 300)] * 4)
        wait_until(lambda: client.status().queues.num_running == 4, "they run")
        watched.system.workers["w0"].kill()
        wait_until(lambda: watched.value("motet_workers") == 0, "it is gone")
        watched.system.start_hash_worker("w0", STEP)
        assert len(load.result(timeout=120)) == 4
        assert watched.value("motet_migrations_total") >= 4
        assert watched.value("motet_workers") == 1


def test_clients_get_errors_and_a_tenant_uses_everything(model_dir: Path, tmp_path: Path) -> None:
    with watching(model_dir, tmp_path) as (watched, client):
        watched.system.start_hash_worker("w0", STEP)
        for _ in range(3):
            with pytest.raises(NotFound):
                client.generate([9], adapter="nobody").result()
        assert watched.value("motet_rpc_errors_total", reason="ADAPTER_NOT_FOUND") == 3
        ask_all(client, [Job((9, 10, 11), "", 20)] * 2)
        wait_until(lambda: watched.value("motet_tenant_generated_tokens_total") == 40, "they are counted")


def test_the_host_cache_is_gone(model_dir: Path, tmp_path: Path) -> None:
    with watching(model_dir, tmp_path) as (watched, _client):
        wait_until(lambda: watched.value("motet_host_cache_available") == 1, "Redis responds")
        redis = watched.system.redis_process()
        redis.suspend()
        try:
            wait_until(lambda: watched.value("motet_host_cache_available") == 0, "it is found gone", 60.0)
        finally:
            redis.resume()
        wait_until(lambda: watched.value("motet_host_cache_available") == 1, "it is back", 60.0)


def test_the_runbook_has_the_metrics_of_these_tests() -> None:
    """But for those of the audit log, which tests/control_plane/audit provokes."""
    text = Path(__file__).read_text("utf-8")
    in_tests = {re.sub(r"_(sum|count)$", "", name) for name in re.findall(r'value\("(motet_[a-z_]+)"', text)}
    assert in_tests <= set(re.findall(r"`(motet_[a-z_]+)`", RUNBOOK))
