"""No worker runs: the first request has one started, waits for it and gets the model's tokens; then it is ended again.

The test stands for KEDA: it reads the scaler's stream and starts or stops the worker as it says.
"""

from __future__ import annotations

import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import pytest
from motet import DeadlineExceeded

from control_plane.scaler.v1 import externalscaler_pb2 as keda
from control_plane.scaler.v1.externalscaler_pb2_grpc import ExternalScalerStub
from tests.e2e.harness import System, wait_until
from tests.e2e.test_metrics import free_address
from tests.e2e.traffic import Job, ask, ask_all
from tests.makers import make_adapter, make_checkpoint
from tests.oracle import Oracle

TIMEOUT_S = 120.0
NUM_TOKENS = 24
WORKER_FLAGS = ["--dtype", "float32", "--num-blocks", "64", "--arena-bytes", "64MiB", "--max-rows", "8"]
SCALED = keda.ScaledObjectRef(name="motet-worker", namespace="motet")

pytestmark = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")


def test_the_first_request_starts_a_worker_and_gets_its_tokens(tmp_path: Path) -> None:
    model = make_checkpoint(tmp_path / "model", arch="llama")
    adapter = make_adapter(tmp_path / "adapter", model, rank=4, alpha=8, targets=["q_proj", "v_proj"], seed=1)
    scaler, metrics = free_address(), free_address()
    flags = ["--scaler-listen", scaler, "--metrics-listen", metrics, "--worker-grace-s", "0"]
    with (
        System(model, tmp_path, control_flags=flags) as system,
        grpc.insecure_channel(scaler) as channel,
        ThreadPoolExecutor(8) as pool,
    ):
        kedas = ExternalScalerStub(channel)
        changes = kedas.StreamIsActive(SCALED, timeout=TIMEOUT_S)
        assert not next(changes).result
        assert status_of(f"http://{metrics}/readyz") == 200, "requests may be sent, so that one can wait"
        client = system.client()
        client.adapters.register("a", adapter)

        jobs = [Job((9, 10, 11), "a", NUM_TOKENS), Job((9, 10, 11), "", NUM_TOKENS)]
        first = pool.submit(ask, client, jobs[0])
        assert next(changes).result, "KEDA would start a worker"
        assert wanted_workers(kedas) == 1
        others = [pool.submit(ask, client, job) for job in jobs]
        wait_until(lambda: client.status().queues.num_waiting == 3, "all wait")

        worker = system.start_worker("w0", WORKER_FLAGS)
        completions = [future.result(timeout=TIMEOUT_S) for future in (first, *others)]
        assert {len(completion.token_ids) for completion in completions} == {NUM_TOKENS}
        assert completions[0].token_ids == completions[1].token_ids != completions[2].token_ids
        oracle = Oracle(model, {"a": adapter})
        for completion in completions:
            agreed = oracle.num_agreed(completion.job.prompt, completion.token_ids, completion.job.adapter)
            assert agreed == NUM_TOKENS

        assert not next(changes).result, "KEDA would end the worker after its cooldown period"
        worker.stop()
        wait_until(lambda: not client.status().workers, "it has left")
        again = pool.submit(ask, client, jobs[0])
        assert next(changes).result, "and start one again"
        system.start_worker("w1", WORKER_FLAGS)
        assert again.result(timeout=TIMEOUT_S).token_ids == completions[0].token_ids


def test_a_request_waits_for_no_longer_than_its_deadline_and_others_are_not_refused(tmp_path: Path) -> None:
    model = make_checkpoint(tmp_path / "model", arch="llama")
    scaler = free_address()
    with (
        System(model, tmp_path, control_flags=["--scaler-listen", scaler, "--worker-grace-s", "0"]) as system,
        grpc.insecure_channel(scaler) as channel,
    ):
        client = system.client()
        with pytest.raises(DeadlineExceeded):
            client.generate([9, 10], max_tokens=4, timeout_s=1.0).result()
        wait_until(lambda: not ExternalScalerStub(channel).IsActive(SCALED, timeout=TIMEOUT_S).result, "nobody waits")
        with ThreadPoolExecutor(1) as pool:
            load = pool.submit(ask_all, client, [Job((9, 10, 11), "", 5)] * 3)
            wait_until(lambda: client.status().queues.num_waiting == 3, "they wait")
            system.start_hash_worker()
            assert len(load.result(timeout=TIMEOUT_S)) == 3


def wanted_workers(kedas: ExternalScalerStub) -> float:
    (spec,) = kedas.GetMetricSpec(SCALED, timeout=TIMEOUT_S).metricSpecs
    request = keda.GetMetricsRequest(scaledObjectRef=SCALED, metricName=spec.metricName)
    (value,) = kedas.GetMetrics(request, timeout=TIMEOUT_S).metricValues
    return float(value.metricValue / spec.targetSize)


def status_of(url: str) -> int:
    try:
        with urllib.request.urlopen(url) as response:
            return int(response.status)
    except urllib.error.HTTPError as error:
        return error.code
