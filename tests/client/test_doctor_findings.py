"""Each fault of an installation that `motet doctor` looks for, provoked: it has a name, a state and advice."""

from __future__ import annotations

import errno
import json
import resource
import shutil
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from motet.cli import exits
from motet.cli.main import main

from contract.settings.findings import Finding, State
from contract.settings.probes import LITTLE_ROOM_BYTES
from control_plane.access.settings import AccessSettings
from control_plane.config import ServerConfig
from control_plane.host_cache import embedded
from control_plane.setup import examination as server_examination
from data_plane import examination as worker_examination
from data_plane.config import WorkerConfig
from gateway import examination as gateway_examination
from gateway.config import GatewayConfig
from gateway.http.settings import HttpSettings
from gateway.registry.settings import RegistrySettings
from kernels.native import compiler
from tests.control_plane.host_cache.rig import RedisProcess
from tests.control_plane.server_processes import checkpoint
from tests.docs_commands import ROOT
from tests.fakes.authority import Authority

DAY_S = 86400.0
Found = dict[str, Finding]


def clock_ahead(ahead_s: float) -> Callable[[], float]:
    return lambda: time.time() + ahead_s


def of_server(config: ServerConfig, ahead_s: float = 0.0) -> Found:
    return {finding.what: finding for finding in server_examination.examine(config, clock_ahead(ahead_s))}


def of_worker(config: WorkerConfig, ahead_s: float = 0.0) -> Found:
    return {finding.what: finding for finding in worker_examination.examine(config, clock_ahead(ahead_s))}


def of_gateway(config: GatewayConfig, ahead_s: float = 0.0) -> Found:
    return {finding.what: finding for finding in gateway_examination.examine(config, clock_ahead(ahead_s))}


def server(tmp_path: Path, **more: object) -> ServerConfig:
    return ServerConfig(
        model_dir=checkpoint(tmp_path / "model"),
        data_dir=tmp_path / "data",
        listen="127.0.0.1:0",
        worker_listen="127.0.0.1:0",
        **more,  # type: ignore[arg-type]
    )


def worker(tmp_path: Path, **more: object) -> WorkerConfig:
    return WorkerConfig(control_plane="127.0.0.1:9", model_dir=tmp_path, worker_id="w0", **more)  # type: ignore[arg-type]


@pytest.fixture
def redis_process(tmp_path: Path) -> Iterator[RedisProcess]:
    process = RedisProcess(tmp_path)
    yield process
    process.kill()


def test_a_clock_that_differs_from_that_of_redis_is_named(tmp_path: Path, redis_process: RedisProcess) -> None:
    config = server(tmp_path, redis_url=redis_process.url, worker_redis_url=redis_process.url)
    assert of_server(config)["clock"].state is State.OK
    for ahead_s in (60.0, -60.0):
        finding = of_server(config, ahead_s)["clock"]
        assert finding.state is State.WARNING and f"{ahead_s:+.0f}" in finding.detail and "NTP" in finding.advice


def test_a_redis_that_would_throw_adapters_away_is_named(tmp_path: Path, redis_process: RedisProcess) -> None:
    redis_process.client.config_set("maxmemory-policy", "allkeys-lru")
    config = server(tmp_path, redis_url=redis_process.url, worker_redis_url=redis_process.url)
    [finding] = [found for what, found in of_server(config).items() if what.endswith("maxmemory-policy")]
    assert finding.state is State.WARNING and finding.detail == "allkeys-lru" and "noeviction" in finding.advice


def test_a_redis_that_refuses_the_password_is_wrong(tmp_path: Path, redis_process: RedisProcess) -> None:
    redis_process.client.config_set("requirepass", "right")
    config = server(tmp_path, redis_url=redis_process.url, worker_redis_url=redis_process.url)
    [finding] = [found for what, found in of_server(config).items() if what.startswith("Redis at")]
    assert finding.state is State.WRONG and "password" in finding.advice


def test_the_redis_user_of_the_documents_is_all_that_is_needed(tmp_path: Path, redis_process: RedisProcess) -> None:
    """It may not read the clock, which Motet does not need."""
    [line] = [
        line
        for line in (ROOT / "docs" / "security.md").read_text().splitlines()
        if line.startswith("ACL SETUSER motet-server on ")
    ]
    redis_process.client.execute_command(*line.split())
    url = f"unix://motet-server:SERVER_PASSWORD@{redis_process.socket}"
    found = of_server(server(tmp_path, redis_url=url, worker_redis_url=url))
    [finding] = [value for what, value in found.items() if what.startswith("Redis at")]
    assert finding.state is State.OK and "clock" not in found


def test_a_machine_without_a_redis_server_is_wrong(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def nowhere() -> Path:
        raise embedded.RedisNotFound("there is no redis-server")

    monkeypatch.setattr(embedded, "find_redis_server", nowhere)
    finding = of_server(server(tmp_path))["host cache"]
    assert finding.state is State.WRONG and "--redis-url" in finding.advice


def test_a_store_of_a_newer_format_is_wrong(tmp_path: Path) -> None:
    (tmp_path / "store").mkdir()
    (tmp_path / "store" / "format.json").write_text('{"format": 99}')
    before = sorted((tmp_path / "store").rglob("*"))
    finding = of_server(server(tmp_path, store=str(tmp_path / "store")))["format of the artifact store"]
    assert finding.state is State.WRONG and "format 99" in finding.detail and "copy" in finding.advice
    assert sorted((tmp_path / "store").rglob("*")) == before


def test_a_disk_that_is_full_or_nearly_so_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = server(tmp_path, access=AccessSettings(audit_log=str(tmp_path / "audit.jsonl")))
    names = [f"artifact store {tmp_path / 'data' / 'store'}", f"audit log {tmp_path / 'audit.jsonl'}"]
    monkeypatch.setattr(shutil, "disk_usage", lambda _folder: SimpleNamespace(free=LITTLE_ROOM_BYTES - 1))
    for name in names:
        finding = of_server(config)[name]
        assert (
            finding.state is State.WARNING and "1.0 GiB are free" in finding.detail and "free space" in finding.advice
        )
    # A file that may not grow at all: as on a full disk, but for the number of the error.
    write = Path.write_bytes

    def full(path: Path, data: bytes) -> int:
        write(path, b"")
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", full)
    for name in names:
        finding = of_server(config)[name]
        assert (finding.state, finding.detail) == (State.WRONG, "No space left on device")
        assert finding.advice == "free space on its disk, or use a larger one"
    folder = of_gateway(GatewayConfig(registry=RegistrySettings(upload_dir=tmp_path)))[f"folder of uploads {tmp_path}"]
    assert folder.state is State.WRONG and "free space" in folder.advice
    assert not list(tmp_path.glob(".motet-doctor-*")), "nothing stays"


def test_an_audit_log_that_cannot_be_written_is_wrong(tmp_path: Path) -> None:
    file = tmp_path / "none" / "audit.jsonl"
    found = of_server(server(tmp_path, access=AccessSettings(audit_log=str(file))))[f"audit log {file}"]
    assert found.state is State.WRONG and f"{file.parent} is not a folder" in found.detail
    file.mkdir(parents=True)
    shutil.rmtree(tmp_path / "model")
    found = of_server(server(tmp_path, access=AccessSettings(audit_log=str(file))))[f"audit log {file}"]
    assert (found.state, found.detail) == (State.WRONG, "Is a directory") and "--audit-log" in found.advice
    shutil.rmtree(tmp_path / "model")
    assert not any(name.startswith("audit log") for name in of_server(server(tmp_path)))


def test_few_open_files_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _kind: (256, 256))
    finding = of_server(server(tmp_path))["limit of open files"]
    assert (finding.state, finding.detail) == (State.WARNING, "256") and "LimitNOFILE" in finding.advice


def test_a_worker_without_a_library_and_a_compiler_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_examination, "stored_libraries", lambda _folder: [])
    assert of_worker(worker(tmp_path))["native code"].state is State.OK, "the first start compiles it"
    monkeypatch.setattr(compiler.shutil, "which", lambda _name: None)  # type: ignore[attr-defined]
    finding = of_worker(worker(tmp_path))["native code"]
    assert finding.state is State.WARNING and "gcc" in finding.detail and "slower" in finding.advice


def test_an_image_with_a_library_needs_no_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_examination, "stored_libraries", lambda _folder: ["kernels-x86-64-v3.so"])
    monkeypatch.setattr(compiler.shutil, "which", lambda _name: None)  # type: ignore[attr-defined]
    assert of_worker(worker(tmp_path))["native code"].state is State.OK


def test_native_code_that_was_turned_off_is_named(tmp_path: Path) -> None:
    assert of_worker(worker(tmp_path, native_code="off"))["native code"].state is State.WARNING


def test_a_gpu_that_torch_does_not_see_is_wrong(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    finding = of_worker(worker(tmp_path, device="cuda"))["GPU"]
    assert finding.state is State.WRONG and "driver" in finding.advice


def test_certificates_of_worker_and_gateway_that_end_are_named(tmp_path: Path) -> None:
    authority = Authority()
    ca, (cert, key) = authority.write(tmp_path), authority.issue("localhost").write(tmp_path)
    attaching = worker(
        tmp_path, control_plane_tls_ca=ca, control_plane_tls_cert=cert, control_plane_tls_key=key,
        worker_metrics_listen="127.0.0.1:0",
    )  # fmt: skip
    http = HttpSettings(
        listen="127.0.0.1:0", server="127.0.0.1:9", tls_cert=cert, tls_key=key,
        server_tls_ca=ca, server_tls_cert=cert, server_tls_key=key,
    )  # fmt: skip
    serving = GatewayConfig(http=http)
    not_after_s = attaching.tls_files.not_after_s() if attaching.tls_files else None
    assert not_after_s is not None
    for days, state in {-20: State.OK, -1: State.WARNING, 1: State.WRONG}.items():
        ahead_s = not_after_s + days * DAY_S - time.time()
        found = of_worker(attaching, ahead_s) | of_gateway(serving, ahead_s)
        for what in ("worker", "HTTP port", "gateway for the server"):
            [certificate] = [each for name, each in found.items() if name == f"certificate of the {what}"]
            assert certificate.state is state, certificate
    assert of_worker(attaching)["--worker-metrics-listen 127.0.0.1:0"].state is State.OK


def test_a_certificate_whose_key_is_another_one_is_wrong(tmp_path: Path) -> None:
    authority = Authority()
    cert, _ = authority.issue("localhost").write(tmp_path, "one")
    _, other = authority.issue("localhost").write(tmp_path, "other")
    http = HttpSettings(listen="127.0.0.1:0", server="127.0.0.1:9", tls_cert=cert, tls_key=other)
    finding = of_gateway(GatewayConfig(http=http))["certificate of the HTTP port"]
    assert finding.state is State.WRONG and "--tls-key" in finding.advice


def test_a_port_of_the_gateway_that_is_taken_and_a_server_that_is_away_are_named(tmp_path: Path) -> None:
    with socket.socket() as taken, socket.socket() as silent:
        for each in (taken, silent):
            each.bind(("127.0.0.1", 0))
        taken.listen()
        listen, away = (f"127.0.0.1:{each.getsockname()[1]}" for each in (taken, silent))
        found = of_gateway(GatewayConfig(http=HttpSettings(listen=listen, server=away)))
        reached = of_gateway(GatewayConfig(http=HttpSettings(listen="127.0.0.1:0", server=listen)))
    assert found[f"gateway's --listen {listen}"].state is State.WARNING
    assert found[f"server at {away}"].state is State.WARNING and "--server" in found[f"server at {away}"].advice
    assert reached[f"server at {listen}"].state is State.OK


def test_a_folder_of_uploads_that_cannot_be_written_is_wrong(tmp_path: Path) -> None:
    folder = tmp_path / "uploads"
    folder.mkdir()
    config = GatewayConfig(registry=RegistrySettings(upload_dir=folder))
    folder.rmdir()
    finding = of_gateway(config)[f"folder of uploads {folder}"]
    assert finding.state is State.WRONG and "--upload-dir" in finding.advice


def test_a_file_of_settings_from_the_environment_is_examined_and_a_mistake_in_it_is_wrong(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "motet.toml"
    file.write_text('[gateway]\nlisten = "nowhere"\n')
    monkeypatch.setenv("MOTET_CONFIG", str(file))
    assert main(["doctor", "--json"]) == exits.FAILED
    found = {finding["what"]: finding for finding in map(json.loads, capsys.readouterr().out.splitlines())}
    assert found["gateway: settings"]["state"] == "wrong"
    assert f"motet config check {file}" in found["gateway: settings"]["advice"]
