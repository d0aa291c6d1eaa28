"""The worker process: what it refuses before it starts, its ready line, and its end on a signal."""

from __future__ import annotations

import asyncio
import gc
import importlib
import json
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Never, cast

import grpc
import pytest

from contract.redis_access import RedisTls
from contract.v1 import plan_pb2
from contract.v1.plan_pb2_grpc import WorkerServiceStub
from data_plane.adapters.format.sources import ControlPlaneSource, FallbackSource
from data_plane.config import WorkerConfig
from data_plane.errors import AdapterUnavailable, ConfigError
from data_plane.worker import (
    SWITCH_INTERVAL_S,
    host_cache_access,
    host_tier,
    main,
    refuse_foreign_kernels,
    settle,
    source_factory,
)
from tests.fakes.authority import Authority
from tests.fakes.fleet_rig import FINGERPRINT, GrpcRig, expected, make_request, read_all

ROOT = Path(__file__).parents[2]


def test_a_foreign_kernels_distribution_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    refuse_foreign_kernels()
    info = tmp_path / "kernels-0.5.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: kernels\nVersion: 0.5.0\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    importlib.invalidate_caches()
    with pytest.raises(ConfigError, match=r"kernels' 0\.5\.0 is installed"):
        refuse_foreign_kernels()


def test_a_wrong_setting_ends_with_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--model", "m", "--num-blocks", "0"]) == 2
    assert capsys.readouterr().err == "motet worker: --num-blocks: 0 is below 1\n"


def test_no_checkpoint_and_an_unknown_flag_end_with_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--model", str(tmp_path / "none")]) == 2
    assert capsys.readouterr().err.startswith(f"motet worker: --model: there is no directory {tmp_path / 'none'}; give")
    with pytest.raises(SystemExit) as caught:
        main(["--model", "m", "--nonsense"])
    assert caught.value.code == 2
    assert capsys.readouterr().err == "motet worker: unrecognized arguments: --nonsense; see motet worker --help\n"


def worker_config(tmp_path: Path, control_plane: str = "127.0.0.1:1", **settings: Any) -> WorkerConfig:
    return WorkerConfig(control_plane=control_plane, model_dir=tmp_path, worker_id="w0", **settings)


def test_a_built_worker_is_frozen_and_its_threads_take_short_turns() -> None:
    interval_s = sys.getswitchinterval()
    try:
        settle()
        assert gc.get_freeze_count() > 0
        assert sys.getswitchinterval() == pytest.approx(SWITCH_INTERVAL_S)
        assert interval_s > 2 * SWITCH_INTERVAL_S
    finally:
        gc.unfreeze()
        sys.setswitchinterval(interval_s)


def welcome(url: str, *, needs_password: bool = False) -> plan_pb2.Welcome:
    return plan_pb2.Welcome(host_cache_url=url, host_cache_needs_password=needs_password)


def test_the_worker_adds_its_own_password_to_the_url_of_the_control_plane(tmp_path: Path) -> None:
    file = tmp_path / "password"
    file.write_text("pw")
    config = worker_config(tmp_path, worker_redis_password_file=file)
    access, reason = host_cache_access(config, welcome("redis://motet-worker@host", needs_password=True))
    assert access is not None and not reason
    assert access.options()["credential_provider"].get_credentials() == ("motet-worker", "pw")
    assert host_cache_access(config, welcome("")) == (None, "")


def test_a_url_of_the_worker_itself_goes_before_that_of_the_control_plane(tmp_path: Path) -> None:
    config = worker_config(tmp_path, worker_redis_url="redis://motet-worker:planted@near")
    access, _ = host_cache_access(config, welcome("redis://motet-worker@far", needs_password=True))
    assert access is not None and access.url.endswith("@near")
    assert "planted" not in f"{config!r} {config.describe()} {access!r}"


def test_adapters_are_kept_in_host_memory_only_where_a_budget_is_given(tmp_path: Path) -> None:
    assert host_tier(worker_config(tmp_path)) is None
    tier = host_tier(worker_config(tmp_path, pinned_bytes=1 << 20, device="cpu"))
    assert tier is not None and tier.stats().budget_bytes == 1 << 20
    make_source = source_factory(worker_config(tmp_path), tier)
    with grpc.insecure_channel("127.0.0.1:1") as channel:
        sources = [make_source(WorkerServiceStub(channel), welcome("")) for _ in range(2)]  # of two sessions
    for source in sources:
        assert not isinstance(source, ControlPlaneSource)
        with pytest.raises(AdapterUnavailable):
            source.open("a" * 64)
    assert tier.stats().num_misses == 2


def test_without_a_password_adapters_come_through_the_control_plane_and_the_log_says_so_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    make_source = source_factory(worker_config(tmp_path))
    with grpc.insecure_channel("127.0.0.1:1") as channel:
        stub = WorkerServiceStub(channel)
        for _ in range(3):
            source = make_source(stub, welcome("redis://motet-worker@host", needs_password=True))
            assert isinstance(source, ControlPlaneSource)
        assert isinstance(make_source(stub, welcome("unix://motet-worker@/s")), FallbackSource)
    (warning,) = [record.getMessage() for record in caplog.records]
    assert warning.startswith("the host cache needs a password") and "--worker-redis-password-file" in warning


@pytest.mark.parametrize(("address", "reads_files"), [("127.0.0.1:1", True), ("head.example:50052", False)])
def test_only_a_control_plane_of_this_machine_may_name_files(tmp_path: Path, address: str, reads_files: bool) -> None:
    requested: list[plan_pb2.FetchAdapterRequest] = []

    def fetch(request: plan_pb2.FetchAdapterRequest, timeout: float) -> Never:
        requested.append(request)
        raise ValueError("closed")  # as gRPC says of a closed channel

    source = source_factory(worker_config(tmp_path, control_plane=address))(
        cast(WorkerServiceStub, SimpleNamespace(FetchAdapter=fetch)), welcome("")
    )
    with pytest.raises(AdapterUnavailable):
        source.open("a" * 64)
    assert [request.reads_files for request in requested] == [reads_files]


def test_a_worker_with_certificates_for_redis_reads_none_without_tls(tmp_path: Path) -> None:
    ca = Authority().write(tmp_path)
    config = worker_config(tmp_path, redis_tls=RedisTls(ca=ca))
    access, reason = host_cache_access(config, welcome("redis://motet-worker@host"))
    assert access is None and "is not one of rediss://" in reason
    access, reason = host_cache_access(config, welcome("REDIS://motet-worker@host"))
    assert access is None and "must begin with redis://" in reason
    access, reason = host_cache_access(config, welcome("redis://motet-worker@host?colour=red"))
    assert access is None and "does not take: colour" in reason
    access, reason = host_cache_access(config, welcome("rediss://motet-worker@host?ssl_cert_reqs=none"))
    assert access is None and reason.startswith("the URL of the host cache has an option of TLS")
    access, _ = host_cache_access(config, welcome("rediss://motet-worker@host"))
    assert access is not None and access.options()["ssl_ca_certs"] == str(ca)


def test_the_worker_side_of_the_stream_imports_no_torch() -> None:
    code = "import sys, data_plane.worker, tests.fakes.hash_worker; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, env={"PYTHONPATH": ".:client"}, check=True, timeout=60)


async def test_sigterm_while_the_engine_is_built_ends_with_0_and_without_a_word(tmp_path: Path) -> None:
    """The stand-in for the engine's builder hangs in C code's manner: it catches every exception and goes on."""
    engine = tmp_path / "data_plane" / "engine"
    engine.mkdir(parents=True)
    (engine / "__init__.py").write_text("")
    (engine / "build.py").write_text(
        "import time\n"
        "print('building', flush=True)\n"
        "while True:\n"
        "    try:\n"
        "        time.sleep(60)\n"
        "    except BaseException:\n"
        "        pass\n"
    )
    (tmp_path / "config.json").write_text("{}")
    code = (
        f"import sys, data_plane; data_plane.__path__.insert(0, {str(engine.parent)!r});"
        "from data_plane.worker import main; sys.exit(main(sys.argv[1:]))"
    )
    process = await asyncio.create_subprocess_exec(
        *[sys.executable, "-c", code, "--model", str(tmp_path), "--log-level", "warning"],
        cwd=ROOT,
        env={"PYTHONPATH": ".:client"},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        assert process.stdout is not None
        async with asyncio.timeout(30):
            assert await process.stdout.readline() == b"building\n"
            process.send_signal(signal.SIGTERM)
            assert await process.communicate() == (b"", b"")
        assert process.returncode == 0
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


async def test_process_says_that_it_is_ready_and_ends_on_sigterm() -> None:
    async with GrpcRig() as rig:
        process = await asyncio.create_subprocess_exec(
            *[sys.executable, "-m", "tests.fakes.hash_worker", "--control-plane", f"127.0.0.1:{rig.port}"],
            *["--fingerprint", FINGERPRINT, "--worker-id", "w7"],
            cwd=ROOT,
            env={"PYTHONPATH": ".:client"},
            stdout=asyncio.subprocess.PIPE,
        )
        try:
            assert process.stdout is not None
            async with asyncio.timeout(30):
                line = await process.stdout.readline()
                [worker] = rig.fleet.worker_snapshots()
                assert line.decode() == f"motet worker ready worker_id=w7 epoch={worker.epoch}\n"
                request = make_request(rig.fleet, [1, 2], 20, rig.weights.add("a"))
                assert await read_all(rig.fleet.submit(request)) == expected(request)
                process.send_signal(signal.SIGTERM)
                assert await process.wait() == 0
                await rig.until(lambda: rig.fleet.num_workers == 0)
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()


async def test_a_profile_has_what_the_worker_does_between_its_steps(tmp_path: Path) -> None:
    out = tmp_path / "steps.json"
    async with GrpcRig() as rig:
        process = await asyncio.create_subprocess_exec(
            *[sys.executable, "-m", "tests.fakes.hash_worker", "--control-plane", f"127.0.0.1:{rig.port}"],
            *["--fingerprint", FINGERPRINT, "--profile", "5", "--profile-out", str(out)],
            cwd=ROOT,
            env={"PYTHONPATH": ".:client"},
            stdout=asyncio.subprocess.PIPE,
        )
        try:
            assert process.stdout is not None
            async with asyncio.timeout(120):
                await process.stdout.readline()
                request = make_request(rig.fleet, [1, 2], 20, rig.weights.add("a"))
                assert await read_all(rig.fleet.submit(request)) == expected(request)
                process.send_signal(signal.SIGTERM)
                assert await process.wait() == 0
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
    events = [event for event in json.loads(out.read_text())["traceEvents"] if event["ph"] == "X"]
    counts = Counter(event["name"] for event in events)
    assert counts["step"] >= 5
    assert counts["encode the result"] == counts["step"]
    assert counts["load an adapter"] == 1
    assert counts["wait for a plan"] > 1
    assert counts["decode the plan"] > 1
    [load] = {event["tid"] for event in events if event["name"] == "load an adapter"}
    assert load not in {event["tid"] for event in events if event["name"] != "load an adapter"}
