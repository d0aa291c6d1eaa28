"""`motet doctor`: what is wrong with an installation has a name and advice, and the exit status says so."""

from __future__ import annotations

import json
import socket
import time
from pathlib import Path

import pytest
from motet.cli import exits
from motet.cli.local import doctor
from motet.cli.main import main

from contract.settings.findings import Finding, State
from control_plane.access.server_certificates import parse
from control_plane.config import ServerConfig
from control_plane.setup import examination
from tests.control_plane.server_processes import checkpoint
from tests.fakes.authority import Authority

Capture = pytest.CaptureFixture[str]
DAY_S = 86400.0


def settings(tmp_path: Path, text: str = "") -> Path:
    path = tmp_path / "motet.toml"
    path.write_text(
        f'[common]\nmodel = "{checkpoint(tmp_path / "model")}"\n[worker]\ncontrol-plane = "127.0.0.1:9"\n'
        '[control-plane]\nlisten = "127.0.0.1:0"\nworker-listen = "127.0.0.1:0"\n'
        f'data-dir = "{tmp_path / "data"}"\n{text}'
    )
    return path


def examined(path: Path, capsys: Capture) -> tuple[int, dict[str, dict[str, str]]]:
    code = main(["doctor", "--config", str(path), "--json"])
    found = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert all(finding["advice"] for finding in found if finding["state"] != "ok"), found
    return code, {finding["what"]: finding for finding in found}


def of(config: ServerConfig, now_s: float | None = None) -> dict[str, Finding]:
    clock = time.time if now_s is None else lambda: now_s
    return {finding.what: finding for finding in examination.examine(config, clock)}


def config(tmp_path: Path, **more: object) -> ServerConfig:
    model = tmp_path / "model"
    return ServerConfig(
        model_dir=model if model.exists() else checkpoint(model),
        data_dir=tmp_path / "data",
        listen="127.0.0.1:0",
        worker_listen="127.0.0.1:0",
        **more,  # type: ignore[arg-type]
    )


def test_a_good_installation_has_nothing_wrong_and_nothing_stays(tmp_path: Path, capsys: Capture) -> None:
    path = settings(tmp_path)
    before = sorted(tmp_path.rglob("*"))
    code, found = examined(path, capsys)
    assert code == exits.OK
    assert {"motet", "packages", "host cache", "--listen 127.0.0.1:0", "GPU", "native code"} <= found.keys()
    assert not any("gateway" in what or what.startswith("server at") for what in found), "the file has no [gateway]"
    assert "torch" in found["packages"]["detail"]
    assert found["control plane at 127.0.0.1:9"]["state"] == "warning"
    assert sorted(tmp_path.rglob("*")) == before


def test_people_get_lines_with_advice_below(tmp_path: Path, capsys: Capture) -> None:
    assert main(["doctor", "--config", str(settings(tmp_path))]) == exits.OK
    lines = capsys.readouterr().out.splitlines()
    place = next(number for number, line in enumerate(lines) if line.startswith("warning  control plane at"))
    assert lines[place + 1].startswith("         -> start the control plane")


def test_settings_that_cannot_be_used_are_wrong(tmp_path: Path, capsys: Capture) -> None:
    code, found = examined(settings(tmp_path, 'max-connections = 0\nlisten-to = "x"\n'), capsys)
    assert code == exits.FAILED and found["control-plane: settings"]["state"] == "wrong"


def test_a_redis_that_is_not_there_is_wrong(tmp_path: Path, capsys: Capture) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # and does not listen
        url = f"redis://127.0.0.1:{taken.getsockname()[1]}/0"
        code, found = examined(settings(tmp_path, f'redis-url = "{url}"\nworker-redis-url = "{url}"\n'), capsys)
    (name,) = (name for name in found if name.startswith("Redis at"))
    assert code == exits.FAILED and found[name]["state"] == "wrong" and "--redis-url" in found[name]["advice"]


def test_a_store_that_cannot_be_written_is_wrong(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    found = of(config(tmp_path, store=str(tmp_path / "file")))
    finding = found[f"artifact store {tmp_path / 'file'}"]
    assert finding.state is State.WRONG and "--store" in finding.advice


def test_a_port_that_is_taken_is_named(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        finding = of(config(tmp_path, metrics_listen=address))[f"--metrics-listen {address}"]
    assert finding.state is State.WARNING and "in use" in finding.detail


def test_a_certificate_that_ends_soon_or_has_ended_is_named(tmp_path: Path) -> None:
    from control_plane.access.settings import AccessSettings

    cert, key = Authority().issue("localhost").write(tmp_path)
    access = AccessSettings(tls_cert=Path(cert), tls_key=Path(key), insecure=True)
    name = "certificate of the clients' port"
    until = parse(Path(cert).read_bytes(), Path(key).read_bytes()).not_after_s
    days = {-20: State.OK, -1: State.WARNING, 1: State.WRONG}
    assert {day: of(config(tmp_path, access=access), until + day * DAY_S)[name].state for day in days} == days


def test_parts_of_different_versions_are_wrong(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: Capture
) -> None:
    monkeypatch.setattr(doctor, "version_of", lambda name: "0.0.1" if name == "motet-server" else "")
    code, found = examined(settings(tmp_path), capsys)
    assert code == exits.FAILED and "pip install motet-server==" in found["motet-server"]["advice"]
