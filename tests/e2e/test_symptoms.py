"""Each symptom of the runbook in docs/observability.md is provoked here, and the metric that it names shows it."""

from __future__ import annotations

import fcntl
import inspect
import re
import signal
from collections import defaultdict
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest
from motet import Client, NotFound, Unavailable

from tests.e2e.harness import ROOT, System, active_version, wait_until
from tests.e2e.test_metrics import Watched, free_address
from tests.e2e.traffic import Job, ask, ask_all
from tests.makers import make_adapter, make_checkpoint

RUNBOOK = (ROOT / "docs" / "observability.md").read_text("utf-8").split("## Runbook")[1].split("\n## ")[0]
NUM_ADAPTERS = 4
STEP_S = 0.005
STEP = ["--step-time-ms", str(1000 * STEP_S)]
Test = Callable[..., None]
PROVOKED: dict[tuple[str, str], list[Test]] = defaultdict(list)  # symptom and cause -> its tests


def provokes(symptom: str, cause: str) -> Callable[[Test], Test]:
    """Marks the test of a row of the runbook, by its symptom and its third cell."""

    def mark(test: Test) -> Test:
        PROVOKED[symptom, cause].append(test)
        return test

    return mark


def check_runbook(runbook: str) -> None:
    """Every row has a test that provokes it and looks at each metric that the row names. Raises AssertionError."""
    symptom = ""
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in runbook.splitlines() if line[:1] == "|"]
    for first, look_at, cause, _advice in rows[2:]:
        symptom = first or symptom
        tests = PROVOKED.get((symptom, cause), [])
        assert tests, f"no test provokes {symptom!r} ({cause})"
        named = set(re.findall(r"`(motet_[a-z_]+)`", look_at))
        source = "".join(inspect.getsource(test) for test in tests)
        seen = {re.sub(r"_(sum|count)$", "", name) for name in re.findall(r'value\(\s*"(motet_[a-z_]+)"', source)}
        assert named, f"the row {symptom!r} names no metric"
        assert named <= seen, f"the tests of {symptom!r} do not look at {sorted(named - seen)}"


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


@provokes("first tokens are slow", "waiting for a row or for memory")
def test_first_tokens_are_slow_because_requests_queue(model_dir: Path, tmp_path: Path) -> None:
    with watching(model_dir, tmp_path) as (watched, client):
        watched.system.start_hash_worker("w0", [*STEP, "--max-rows", "1"])
        ask_all(client, [Job((9, 10, 11), "", 20)] * 8)
        wait_until(lambda: watched.value("motet_queue_seconds_count") == 8, "all are counted")
        queued_s = watched.value("motet_queue_seconds_sum")
        assert queued_s > 0.8 * watched.value("motet_time_to_first_token_seconds_sum"), "most of it was the queue"


@provokes("first tokens are slow", "long prompts")
def test_first_tokens_are_slow_because_prompts_are_long(model_dir: Path, tmp_path: Path) -> None:
    with watching(model_dir, tmp_path) as (watched, client):
        watched.system.start_hash_worker("w0", [*STEP, "--token-budget", "8"])
        prompts = [tuple(ids) for ids in (range(10, 250), range(249, 9, -1))]  # 30 steps for each of them
        for prompt in prompts:
            ask_all(client, [Job(prompt, "", 2)])
        wait_until(lambda: watched.value("motet_queue_seconds_count") == 2, "both are counted")
        first_token_s = watched.value("motet_time_to_first_token_seconds_sum")
        assert first_token_s >= 60 * STEP_S
        assert watched.value("motet_queue_seconds_sum") < 0.5 * first_token_s, "little of it was the queue"


@provokes("requests wait", "KV blocks are short")
def test_requests_wait_because_the_kv_cache_is_full(model_dir: Path, tmp_path: Path) -> None:
    with watching(model_dir, tmp_path) as (watched, client), ThreadPoolExecutor(1) as pool:
        watched.system.start_hash_worker("w0", [*STEP, "--num-blocks", "24", "--block-size", "16"])
        # Each has room alone, and all together have not.
        load = pool.submit(ask_all, client, [Job(tuple(range(20, 60)), "", 200)] * 12)
        wait_until(lambda: watched.value("motet_requests_waiting") > 0, "requests wait")
        wait_until(lambda: watched.value("motet_kv_cache_usage_ratio") > 0.9, "the blocks are held")
        assert len(load.result(timeout=120)) == 12
        assert watched.value("motet_preemptions_total") > 0


@provokes("first tokens of adapters are slow", "waiting for loads")
@provokes("adapters are loaded again and again", "the host cache or the arena holds fewer adapters than are used")
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
        assert watched.value("motet_adapters_loaded") == 1, "there is one slot"
        assert watched.value("motet_slot_misses_total") > NUM_ADAPTERS, "requests waited for loads again and again"
        assert watched.value("motet_slot_evictions_total") > NUM_ADAPTERS
        assert watched.value("motet_slot_load_seconds_count", source="store") > NUM_ADAPTERS
        assert watched.value("motet_slot_hits_total") + watched.value("motet_slot_misses_total") == 12
        assert watched.value("motet_arena_bytes", state="free") > 0, "it is not the arena that is full"


@provokes("adapters are loaded again and again", "the host cache or the arena holds fewer adapters than are used")
def test_adapters_are_loaded_again_and_again_because_the_arena_is_full(
    model_dir: Path, tmp_path: Path, adapters: dict[str, Path]
) -> None:
    """Slots for all, memory for one; the host cache has all of them."""
    with watching(model_dir, tmp_path) as (watched, client):
        for name, directory in adapters.items():
            client.adapters.register(name, directory)
        watched.system.start_hash_worker("w0", STEP)
        ask_all(client, [Job((9, 10, 11), "a0", 10)])
        wait_until(lambda: watched.value("motet_adapters_loaded") == 1, "one is loaded")
        needed_bytes = watched.value("motet_arena_bytes", state="used")
        watched.system.workers["w0"].stop()
        watched.system.start_hash_worker("w0", [*STEP, "--arena-bytes", str(int(needed_bytes))])
        num_misses = watched.value("motet_slot_misses_total")
        ask_all(client, [Job((9, 10, 11), name, 10) for name in adapters] * 3, num_threads=1)
        wait_until(lambda: watched.value("motet_slot_misses_total") == num_misses + 12, "each waits for a load")
        assert watched.value("motet_arena_bytes", state="free") == 0
        assert watched.value("motet_slot_evictions_total") >= 11
        num_loads = watched.value("motet_slot_load_seconds_count", source="host_cache")
        assert num_loads >= 13 - NUM_ADAPTERS, "all but the first load of each come from the host cache"


@contextmanager
def slow_reads(path: Path) -> Iterator[None]:
    """Whoever opens the file waits until this ends: as long as a lease lasts, which is 45 s by default."""
    previous = signal.signal(signal.SIGIO, signal.SIG_IGN)  # that somebody waits
    with path.open("rb+") as file:
        fcntl.fcntl(file, fcntl.F_SETLEASE, fcntl.F_WRLCK)
        try:
            yield
        finally:
            fcntl.fcntl(file, fcntl.F_SETLEASE, fcntl.F_UNLCK)
            signal.signal(signal.SIGIO, previous)


@provokes("the store is slow", "its disk or its bucket")
def test_the_store_is_slow(model_dir: Path, tmp_path: Path, adapters: dict[str, Path]) -> None:
    """The host cache holds one adapter; reading the other one from the disk takes longer than other requests do."""
    with (
        watching(model_dir, tmp_path, "--host-cache-bytes", "8KiB") as (watched, client),
        ThreadPoolExecutor(1) as pool,
    ):
        watched.system.start_hash_worker("w0", STEP)
        digests = {name: active_version(client.adapters.register(name, adapters[name])).digest for name in ("a0", "a1")}
        ask_all(client, [Job((9, 10, 11), "a1", 5)])  # which the host cache keeps then
        loads_s = watched.value("motet_slot_load_seconds_sum", source="store")
        num_bytes = watched.value("motet_slot_load_bytes_total", source="store")
        reads_s = watched.value("motet_store_call_seconds_sum", kind="read")
        (chunk,) = (watched.system.data_dir / "store" / "blobs" / digests["a0"]).glob("00000.*")
        with slow_reads(chunk):
            waiting = pool.submit(ask, client, Job((9, 10, 11), "a0", 5))
            wait_until(lambda: watched.value("motet_requests_waiting") == 1, "it waits for its adapter")
            ask_all(client, [Job((9, 10, 11), "", 100)])
        waiting.result(timeout=120)
        assert watched.value("motet_slot_load_bytes_total", source="store") > num_bytes
        assert watched.value("motet_slot_load_seconds_sum", source="store") - loads_s >= 100 * STEP_S
        assert watched.value("motet_store_call_seconds_sum", kind="read") - reads_s >= 100 * STEP_S


@provokes("workers come and go", "a worker ends, or its connection breaks")
def test_workers_come_and_go(model_dir: Path, tmp_path: Path) -> None:
    with watching(model_dir, tmp_path) as (watched, client), ThreadPoolExecutor(1) as pool:
        watched.system.start_hash_worker("w0", STEP)
        ask_all(client, [Job((9, 10, 11), "", 400)])
        load = pool.submit(ask_all, client, [Job((9, 10, 11), "", 300)] * 4)
        wait_until(lambda: client.status().queues.num_running == 4, "they run")
        num_steps = watched.value("motet_worker_steps_total")
        watched.system.workers["w0"].kill()
        wait_until(lambda: watched.value("motet_workers") == 0, "it is gone")
        watched.system.start_hash_worker("w0", STEP)
        assert len(load.result(timeout=120)) == 4
        assert watched.value("motet_migrations_total") >= 4
        assert watched.value("motet_workers") == 1
        assert 0 < watched.value("motet_worker_steps_total") < num_steps, "they begin anew with the session"
        log = (watched.system.work_dir / "logs" / "control-plane.log").read_text("utf-8")
        assert "session ended" in log, "where the runbook sends its reader"


@provokes("clients get errors", "[errors.md](errors.md) explains each reason")
@provokes("a tenant uses everything", "one tenant's load")
def test_clients_get_errors_and_a_tenant_uses_everything(model_dir: Path, tmp_path: Path) -> None:
    with watching(model_dir, tmp_path) as (watched, client):
        watched.system.start_hash_worker("w0", STEP)
        for _ in range(3):
            with pytest.raises(NotFound):
                client.generate([9], adapter="nobody").result()
        assert watched.value("motet_rpc_errors_total", reason="ADAPTER_NOT_FOUND") == 3
        ask_all(client, [Job((9, 10, 11), "", 20)] * 2)
        wait_until(lambda: watched.value("motet_tenant_generated_tokens_total") == 40, "they are counted")
        assert watched.value("motet_tenant_requests_total") == 2


@provokes("the host cache is gone", "Redis does not respond; loads read the store")
def test_the_host_cache_is_gone(model_dir: Path, tmp_path: Path) -> None:
    with watching(model_dir, tmp_path) as (watched, client):
        wait_until(lambda: watched.value("motet_host_cache_available") == 1, "Redis responds")
        redis = watched.system.redis_process()
        redis.suspend()
        try:
            wait_until(lambda: watched.value("motet_host_cache_available") == 0, "it is found gone", 60.0)
            assert client.status().adapters.host_cache_error, "`motet status` says why"
        finally:
            redis.resume()
        wait_until(lambda: watched.value("motet_host_cache_available") == 1, "it is back", 60.0)


@provokes("changes are refused", "the audit log cannot be written")
def test_changes_are_refused(model_dir: Path, tmp_path: Path, adapters: dict[str, Path]) -> None:
    """A file that may not grow stands for a full disk."""
    audit = tmp_path / "audit.jsonl"
    with watching(model_dir, tmp_path, "--audit-log", str(audit)) as (watched, client):
        process = psutil.Process(watched.system.control_plane.pid)
        for name in ("a0", "a1"):
            client.adapters.register(name, adapters[name])
        assert watched.value("motet_audit_writable") == 1
        limits = process.rlimit(psutil.RLIMIT_FSIZE)
        process.rlimit(psutil.RLIMIT_FSIZE, (audit.stat().st_size, limits[1]))
        for name in ("a0", "a1"):  # the first one finds it out, the second one is refused
            with pytest.raises(Unavailable, match="audit log"):
                client.adapters.delete(name)
        assert watched.value("motet_audit_writable") == 0
        assert [adapter.id for adapter in client.adapters.list()] == ["a1"]
        process.rlimit(psutil.RLIMIT_FSIZE, limits)
        client.adapters.delete("a1")
        assert watched.value("motet_audit_writable") == 1


def test_every_row_of_the_runbook_has_a_test_that_looks_at_its_metrics() -> None:
    check_runbook(RUNBOOK)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ("| a new symptom | `motet_workers` | nobody knows | wait |", "no test provokes 'a new symptom'"),
        ("| | `motet_workers` | another cause | wait |", "no test provokes 'changes are refused'"),
        ("| workers come and go | `motet_x` | a worker ends, or its connection breaks | wait |", "motet_x"),
        ("| workers come and go | its log | a worker ends, or its connection breaks | wait |", "names no metric"),
    ],
)
def test_a_row_without_a_test_is_found(row: str, message: str) -> None:
    with pytest.raises(AssertionError, match=message):
        check_runbook(f"{RUNBOOK.rstrip()}\n{row}\n")
