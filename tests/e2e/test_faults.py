"""Processes are killed or stopped in the middle of streams: nothing hangs, no token is wrong, everything is freed.

The workers are hash workers: a stale block, a wrong slot, a lost or a doubled token would be a wrong token.
"""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest
from motet import Aborted, Client, ServerStatus

from benchmarks.system import Child
from data_plane.stream.session_watch import EXIT_STUCK
from tests.e2e.harness import ROOT, System, active_version, wait_until
from tests.e2e.traffic import Job, JobCompletion, ask, prompts
from tests.fakes.hash_engine import oracle
from tests.makers import make_adapter, make_checkpoint

NUM_ADAPTERS = 4
WORKER_FLAGS = ["--step-time-ms", "3", "--num-blocks", "4096", "--max-rows", "32"]


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("model"), arch="llama")


@pytest.fixture
def system(model_dir: Path, tmp_path: Path) -> Iterator[System]:
    with System(model_dir, tmp_path) as system:
        client = system.client()
        for index in range(NUM_ADAPTERS):
            directory = make_adapter(tmp_path / f"a{index}", model_dir, rank=4, alpha=8, targets=["q_proj"], seed=index)
            client.adapters.register(f"a{index}", directory)
        yield system


class Streams:
    """Requests over all adapters that run while the test breaks something."""

    def __init__(self, client: Client, *, num_requests: int = 24, num_tokens: int = 250) -> None:
        texts = prompts([5 + 7 * (i % 9) for i in range(num_requests)], vocab_size=256, seed=num_requests)
        names = ["", *(f"a{i}" for i in range(NUM_ADAPTERS))]
        self._jobs = [Job(text, names[i % len(names)], num_tokens) for i, text in enumerate(texts)]
        self._pool = ThreadPoolExecutor(num_requests)
        self._completions: list[Future[JobCompletion]] = [self._pool.submit(ask, client, job) for job in self._jobs]

    def check(self, fingerprint: str) -> None:
        """Every stream ends with exactly the oracle's tokens."""
        try:
            for future in self._completions:
                completion = future.result(timeout=90)
                job = completion.job
                assert completion.token_ids == oracle(fingerprint, completion.digest, list(job.prompt), job.num_tokens)
                assert bool(completion.digest) == bool(job.adapter)
        finally:
            self._pool.shutdown(cancel_futures=True)


def num_sampled(status: ServerStatus) -> int:
    return sum(worker.num_tokens_sampled for worker in status.workers)


def is_idle(status: ServerStatus) -> bool:
    """Nothing is accepted and unfinished, no block is held."""
    return status.queues.num_requests == 0 and all(
        worker.num_blocks_held == 0 and worker.num_running == 0 and worker.num_plans_in_flight == 0
        for worker in status.workers
    )


def wait_for_traffic(client: Client) -> None:
    before = num_sampled(client.status())
    wait_until(lambda: num_sampled(client.status()) > before + 200, "tokens flow")


def dead_or_done(worker: Child, futures: Sequence[Future[JobCompletion]]) -> bool:
    """Whether the worker ended, or no call waits for it."""
    return worker.exit_code is not None or all(future.done() for future in futures)


def test_worker_killed_mid_stream_loses_and_repeats_no_token(system: System) -> None:
    system.start_hash_worker("w0", WORKER_FLAGS)
    system.start_hash_worker("w1", WORKER_FLAGS)
    client = system.client()
    streams = Streams(client)
    wait_for_traffic(client)
    system.workers["w0"].kill()
    streams.check(client.status().model.fingerprint)
    wait_until(lambda: is_idle(client.status()), "idle")
    status = client.status()
    assert status.queues.num_migrated > 0
    assert [worker.worker_id for worker in status.workers] == ["w1"]


def test_only_worker_killed_and_started_again(system: System) -> None:
    system.start_hash_worker("w0", WORKER_FLAGS)
    client = system.client()
    streams = Streams(client)
    wait_for_traffic(client)
    system.workers["w0"].kill()
    system.start_hash_worker("w0", WORKER_FLAGS)
    streams.check(client.status().model.fingerprint)
    wait_until(lambda: is_idle(client.status()), "idle")


def test_a_request_that_kills_its_worker_process_is_isolated_and_the_others_finish(
    model_dir: Path, tmp_path: Path
) -> None:
    """The process ends without a word, as by SIGKILL, whenever it is fed the crash token; somebody starts it again."""
    crash_token, num_tokens = 250, 40
    with System(model_dir, tmp_path, control_flags=["--worker-grace-s", "120"]) as system:
        client = system.client()
        fingerprint = client.status().model.fingerprint
        texts = prompts([6 + i for i in range(24)], vocab_size=200, seed=5)
        completions = {text: oracle(fingerprint, "", list(text), num_tokens) for text in texts}
        innocents = [Job(text, "", num_tokens) for text in texts if crash_token not in completions[text]][:9]
        assert len(innocents) == 9
        poison = Job((*texts[0], crash_token), "", num_tokens)
        with ThreadPoolExecutor(10) as pool:
            futures = [pool.submit(ask, client, job) for job in [*innocents[:4], poison, *innocents[4:]]]
            wait_until(lambda: client.status().queues.num_accepted == 10, "every request is accepted")
            num_deaths = 0
            while not all(future.done() for future in futures):
                worker = system.start_hash_worker("w0", ["--crash-token", str(crash_token)], wait=False)
                wait_until(partial(dead_or_done, worker, futures), "the worker dies, or everything is answered", 90.0)
                num_deaths += worker.exit_code is not None
        [error] = [future.exception() for future in futures if future.exception() is not None]
        assert isinstance(error, Aborted) and error.reason == "POISONED_REQUEST"
        for job, future in zip(innocents, futures[:4] + futures[5:], strict=True):
            assert future.result().token_ids == completions[job.prompt]
        assert 3 <= num_deaths <= 3 + 4  # of ten requests
        wait_until(lambda: is_idle(client.status()), "idle")


def test_a_step_that_hangs_moves_its_requests_and_ends_the_worker(model_dir: Path, tmp_path: Path) -> None:
    """Only the compute thread hangs: heartbeats go on, and nothing but the time of the step shows it."""
    hang_token, num_tokens = 250, 40
    flags = ["--step-timeout-s", "4", "--first-step-timeout-s", "8"]
    with System(model_dir, tmp_path, control_flags=flags) as system:
        hanging = system.start_hash_worker("w0", ["--hang-token", str(hang_token)])
        client = system.client()
        fingerprint = client.status().model.fingerprint
        jobs = [Job((*text, hang_token), "", num_tokens) for text in prompts([6, 9], vocab_size=200, seed=5)]
        with ThreadPoolExecutor(2) as pool:
            futures = [pool.submit(ask, client, job) for job in jobs]
            wait_until(lambda: client.status().queues.num_accepted == 2, "the requests are accepted")
            system.start_hash_worker("w1", WORKER_FLAGS)
            for job, future in zip(jobs, futures, strict=True):
                assert future.result(timeout=90).token_ids == oracle(fingerprint, "", list(job.prompt), num_tokens)
        wait_until(lambda: hanging.exit_code is not None, "the stuck worker exits", timeout_s=60.0)
        assert hanging.exit_code == EXIT_STUCK
        assert [worker.worker_id for worker in client.status().workers] == ["w1"]


def test_stopped_worker_is_fenced_and_comes_back_clean(system: System) -> None:
    system.start_hash_worker("w0", WORKER_FLAGS)
    system.start_hash_worker("w1", WORKER_FLAGS)
    client = system.client()
    streams = Streams(client)
    wait_for_traffic(client)
    system.workers["w0"].send(signal.SIGSTOP)
    streams.check(client.status().model.fingerprint)
    wait_until(lambda: len(client.status().workers) == 1, "the stopped worker is declared dead")
    system.workers["w0"].send(signal.SIGCONT)
    wait_until(lambda: len(client.status().workers) == 2, "it attaches again")
    again = Streams(client, num_requests=12, num_tokens=60)
    again.check(client.status().model.fingerprint)
    wait_until(lambda: is_idle(client.status()), "idle")


def test_redis_killed_mid_stream_and_cold_adapters_still_load(system: System) -> None:
    system.start_hash_worker("w0", [*WORKER_FLAGS, "--num-slots", "2"])
    client = system.client()
    streams = Streams(client)
    wait_for_traffic(client)
    system.redis_process().kill()
    streams.check(client.status().model.fingerprint)
    again = Streams(client, num_requests=10, num_tokens=40)
    again.check(client.status().model.fingerprint)
    wait_until(lambda: client.status().adapters.host_cache_available, "embedded Redis is started again")
    wait_until(lambda: is_idle(client.status()), "idle")


def test_control_plane_killed_and_started_again(system: System) -> None:
    system.start_hash_worker("w0", WORKER_FLAGS)
    client = system.client()
    fingerprint = client.status().model.fingerprint
    names = [(adapter.id, active_version(adapter).digest) for adapter in client.adapters.list()]
    streams = Streams(client)
    wait_for_traffic(client)
    system.control_plane.kill()
    system.start_control_plane()
    streams.check(fingerprint)
    assert [(adapter.id, active_version(adapter).digest) for adapter in client.adapters.list()] == names
    wait_until(lambda: is_idle(client.status()), "idle")


def test_client_killed_mid_stream_frees_everything(system: System) -> None:
    system.start_hash_worker("w0", WORKER_FLAGS)
    client = system.client()
    baseline = client.status()
    program = (
        "import sys; from motet import Client\n"
        "stream = Client(sys.argv[1]).generate([9] * 40, adapter='a0', max_tokens=470, ignore_eos=True)\n"
        "for chunk in stream: print(len(chunk.token_ids), flush=True)\n"
    )
    child = subprocess.Popen(
        [sys.executable, "-c", program, system.address], cwd=ROOT / "client", stdout=subprocess.PIPE, text=True
    )
    assert child.stdout is not None
    with child, child.stdout:
        assert child.stdout.readline().strip()
        assert client.status().queues.num_requests == 1
        child.kill()
    wait_until(lambda: is_idle(client.status()), "the killed client's request is gone")
    after = client.status()
    assert after.workers[0].num_blocks_held == baseline.workers[0].num_blocks_held == 0
    Streams(client, num_requests=6, num_tokens=30).check(after.model.fingerprint)


def test_worker_terminated_politely_hands_its_requests_over(system: System) -> None:
    system.start_hash_worker("w0", WORKER_FLAGS)
    system.start_hash_worker("w1", WORKER_FLAGS)
    client = system.client()
    streams = Streams(client)
    wait_for_traffic(client)
    assert system.workers["w0"].stop(40.0) == 0
    streams.check(client.status().model.fingerprint)


def test_control_plane_terminated_politely_lets_streams_finish(system: System) -> None:
    system.start_hash_worker("w0", WORKER_FLAGS)
    client = system.client()
    fingerprint = client.status().model.fingerprint
    streams = Streams(client, num_tokens=120)
    wait_until(lambda: client.status().queues.num_accepted == 24, "every stream is accepted")
    assert system.control_plane.stop(40.0) == 0
    streams.check(fingerprint)


def workers_command(system: System, *arguments: str) -> str:
    """What `motet workers` prints."""
    command = [sys.executable, "-m", "motet", "--server", system.address, "workers", *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True, cwd=ROOT, timeout=60).stdout


def test_a_drained_worker_gives_its_requests_away_and_stays(system: System) -> None:
    client = system.client()
    fingerprint = client.status().model.fingerprint
    for worker_id in ("w0", "w1"):
        system.start_hash_worker(worker_id, WORKER_FLAGS)
    streams = Streams(client, num_requests=12, num_tokens=400)
    wait_for_traffic(client)
    assert " requests were moved" in workers_command(system, "drain", "w0")
    wait_until(lambda: len(client.status().workers) == 2, "the drained worker attached again")
    streams.check(fingerprint)
    Streams(client, num_requests=12, num_tokens=20).check(fingerprint)
    status = client.status()
    assert status.queues.num_migrated > 0 and status.drained_worker_ids == ("w0",)
    assert [worker.num_tokens_sampled > 0 for worker in status.workers] == [False, True]
    rows = [line.split() for line in workers_command(system, "list").splitlines()]
    assert [row[:2] for row in rows[1:]] == [["w0", "drained"], ["w1", "takes"]]
    assert workers_command(system, "undrain", "w0") == "w0 gets requests\n"
    Streams(client, num_requests=12, num_tokens=20).check(fingerprint)
    assert all(worker.num_tokens_sampled > 0 for worker in client.status().workers)


def test_a_rolling_upgrade_of_workers_and_control_plane_fails_no_stream(model_dir: Path, tmp_path: Path) -> None:
    """Each process is ended politely while streams run, and its successor is another process.

    The control plane lets streams finish for a second only: the SDK goes on with the others at the successor.
    """
    with System(model_dir, tmp_path, control_flags=["--drain-timeout-s", "1"]) as system:
        client = system.client()
        for index in range(NUM_ADAPTERS):
            directory = make_adapter(tmp_path / f"a{index}", model_dir, rank=4, alpha=8, targets=["q_proj"], seed=index)
            client.adapters.register(f"a{index}", directory)
        fingerprint = client.status().model.fingerprint
        for worker_id in ("w0", "w1"):
            system.start_hash_worker(worker_id, WORKER_FLAGS)
        waves = []
        for worker_id in ("w0", "w1"):
            system.start_hash_worker(f"{worker_id}-new", WORKER_FLAGS)
            waves.append(Streams(client, num_requests=12, num_tokens=400))
            wait_for_traffic(client)
            assert system.workers[worker_id].stop(40.0) == 0
        assert sorted(worker.worker_id for worker in client.status().workers) == ["w0-new", "w1-new"]
        assert client.status().queues.num_migrated > 0, "requests that ran on a worker that left went on elsewhere"
        waves.append(Streams(client, num_requests=12, num_tokens=450))
        wait_for_traffic(client)
        former = system.control_plane.pid
        assert system.control_plane.stop(40.0) == 0
        system.start_control_plane()
        assert system.control_plane.pid != former
        waves.append(Streams(client, num_requests=12, num_tokens=60))
        for wave in waves:
            wave.check(fingerprint)
        assert client.status().queues.num_accepted > 12, "beside the last wave, streams that the former one broke off"
        wait_until(lambda: len(client.status().workers) == 2 and is_idle(client.status()), "both are back and idle")
