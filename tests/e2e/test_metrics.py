"""The metrics of a running system: what happened is in them, and the documentation has every one."""

from __future__ import annotations

import re
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from motet import NotFound
from prometheus_client.parser import text_string_to_metric_families

from tests.e2e.harness import ROOT, System, wait_until
from tests.makers import make_adapter, make_checkpoint, make_tokenizer
from tests.secret_scan import SCAN

DOCUMENT = ROOT / "docs" / "observability.md"
WORKER_PART = "Of a worker ("  # the table behind it is that of the worker's port


class Watched:
    """A system with a metrics port."""

    def __init__(self, system: System, address: str) -> None:
        self.system = system
        self._address = address

    def text(self, path: str = "/metrics") -> str:
        with urllib.request.urlopen(f"http://{self._address}{path}") as response:
            text: str = response.read().decode()
        SCAN.look("the metrics", text)
        return text

    def is_ready(self) -> bool:
        try:
            return self.text("/readyz") == "ok\n"
        except urllib.error.HTTPError as error:
            if error.code != 503:
                raise
            return False

    def value(self, name: str, **labels: str) -> float:
        """The sum over all series with these labels."""
        return sum(
            sample.value
            for family in text_string_to_metric_families(self.text())
            for sample in family.samples
            if sample.name == name and labels.items() <= sample.labels.items()
        )


def free_address() -> str:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{free.getsockname()[1]}"


@pytest.fixture(scope="module")
def watched(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Watched]:
    directory = tmp_path_factory.mktemp("metrics")
    checkpoint = make_tokenizer(make_checkpoint(directory / "model"))
    address = free_address()
    flags = ["--metrics-listen", address, "--audit-log", str(directory / "audit.log")]
    with System(checkpoint, directory, control_flags=flags) as system:
        with pytest.raises(urllib.error.HTTPError, match="503"):
            Watched(system, address).text("/readyz")
        system.start_hash_worker()
        system.client().adapters.register("legal", make_adapter(directory / "legal", checkpoint, seed=1))
        yield Watched(system, address)


def test_requests_tokens_and_errors_are_counted(watched: Watched) -> None:
    client = watched.system.client()
    before = watched.value("motet_requests_accepted_total")
    for adapter in ("", "legal", "legal"):
        result = client.generate([5, 6, 7], adapter=adapter, max_tokens=4, ignore_eos=True).result()
        assert len(result.token_ids) == 4
    with pytest.raises(NotFound):
        client.generate([5], adapter="nobody").result()
    # A request is counted when its stream has ended, which is a moment after its last message.
    wait_until(lambda: watched.value("motet_adapter_requests_total", adapter="legal") == 2, "both are counted")
    assert watched.value("motet_requests_accepted_total") == before + 3
    assert watched.value("motet_adapter_requests_total", adapter="_base") >= 1
    assert watched.value("motet_adapter_generated_tokens_total", adapter="legal") == 8
    assert watched.value("motet_requests_finished_total", reason="length") >= 3
    assert watched.value("motet_rpc_errors_total", reason="ADAPTER_NOT_FOUND") == 1
    assert watched.value("motet_time_to_first_token_seconds_count") >= 3
    assert watched.value("motet_adapter_loaded", adapter="legal", worker="w0") == 1
    assert watched.value("motet_workers") == 1
    assert watched.value("motet_kv_blocks") == watched.system.client().status().workers[0].num_blocks


def test_a_cancelled_request_is_counted_with_its_reason(watched: Watched) -> None:
    with watched.system.client().generate([5, 6], max_tokens=400, ignore_eos=True) as stream:
        next(stream)
    wait_until(lambda: watched.value("motet_requests_finished_total", reason="CANCELLED") == 1, "it is counted")
    wait_until(lambda: watched.value("motet_requests_running") == 0, "nothing runs")


def test_probes_and_the_view_for_routers(watched: Watched) -> None:
    assert watched.text("/healthz") == watched.text("/readyz") == "ok\n"
    assert 'running_lora_adapters="legal"' in watched.text("/metrics?names=vllm")


def shown_names(text: str) -> set[str]:
    """Names of metrics as queries have them."""
    suffixes = {"counter": "_total", "info": "_info"}
    names = {family.name + suffixes.get(family.type, "") for family in text_string_to_metric_families(text)}
    return {name for name in names if not name.endswith("_created")}


def documented_names(text: str, prefix: str) -> set[str]:
    return {name.rstrip("{") for name in re.findall(rf"`({prefix}[a-z_0-9]+)(?:\{{[^`]*)?`", text)}


def test_the_documentation_has_every_metric_and_no_other(watched: Watched) -> None:
    watched.system.client().generate([5], max_tokens=2, adapter="legal").result()
    ours, rest = DOCUMENT.read_text("utf-8").split(WORKER_PART)
    for path, prefix, document in (("/metrics", "motet_", ours), ("/metrics?names=vllm", "vllm:", rest)):
        shown = {name for name in shown_names(watched.text(path)) if name.startswith(prefix)}
        assert shown - documented_names(document, prefix) == set()
        assert documented_names(document, prefix) - shown == set()


def test_a_real_worker_shows_its_steps_and_loads(tmp_path: Path) -> None:
    checkpoint = make_tokenizer(make_checkpoint(tmp_path / "model"))
    address = free_address()
    with System(checkpoint, tmp_path) as system:
        flags = ["--num-blocks", "64", "--arena-bytes", "64MiB", "--pinned-bytes", "64MiB"]
        system.start_worker("real", [*flags, "--worker-metrics-listen", address])
        worker, client = Watched(system, address), system.client()
        wait_until(worker.is_ready, "the worker knows that it is attached, which the control plane knows first")
        client.adapters.register("legal", make_adapter(tmp_path / "legal", checkpoint, seed=1))
        assert len(client.generate([5, 6, 7], adapter="legal", max_tokens=3, ignore_eos=True).result().token_ids) == 3
        wait_until(lambda: worker.value("motet_step_tokens_total", phase="decode") == 2, "two steps behind the prompt")
        assert worker.value("motet_step_tokens_total", phase="prefill") == 3
        assert worker.value("motet_adapter_load_seconds_count", outcome="ready") == 1
        assert worker.value("motet_worker_arena_used_bytes") > 0
        names = {name for name in shown_names(worker.text()) if name.startswith("motet_")}
        assert documented_names(DOCUMENT.read_text("utf-8").split(WORKER_PART)[1], "motet_") == names


def test_an_address_that_is_taken_ends_the_start_in_one_line(watched: Watched, tmp_path: Path) -> None:

    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        command = [sys.executable, "-m", "control_plane", "--model", str(watched.system.model_dir)]
        command += ["--data-dir", str(tmp_path / "data"), "--listen", "127.0.0.1:0", "--worker-listen", "127.0.0.1:0"]
        command += ["--host-cache", "memory", "--metrics-listen", address]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert f"--metrics-listen: {address} cannot be listened on" in done.stderr.splitlines()[-1]
