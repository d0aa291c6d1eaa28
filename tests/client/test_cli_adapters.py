"""`motet adapters` against a scripted server."""

from __future__ import annotations

import json
from pathlib import Path

import grpc
import pytest
from google.rpc import status_pb2
from motet.cli import exits
from motet.cli.main import main
from motet.v1 import adapters_pb2

from tests.client.scripted_server import DIGEST, ScriptedServer, make_adapter

Capture = pytest.CaptureFixture[str]


def motet(server: ScriptedServer, *argv: str) -> int:
    return main(["--server", server.target, *argv])


@pytest.mark.parametrize("is_cached", [False, True])
def test_pin_says_when_the_adapter_is_not_in_the_host_cache(
    server: ScriptedServer, capsys: Capture, is_cached: bool
) -> None:
    adapter = server.adapters["pirate"] = make_adapter("pirate")
    if is_cached:
        adapter.placements.add(tier=adapters_pb2.ADAPTER_TIER_HOST_CACHE)
    assert motet(server, "adapters", "pin", "pirate") == 0
    printed = capsys.readouterr()
    assert printed.out.startswith("pinned pirate: version ")
    assert ("is pinned, but not in the host cache now" in printed.err) is not is_cached


def test_adapters_add_get_pin_versions_activate_remove(server: ScriptedServer, capsys: Capture, tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text("{}")
    (tmp_path / "adapter_model.safetensors").write_bytes(b"weights")
    assert motet(server, "adapters", "add", "pirate", str(tmp_path), "--label", "team=sea") == 0
    assert capsys.readouterr().out == f"registered pirate: version 2 ({DIGEST[:12]})\n"
    assert dict(server.adapters["pirate"].labels) == {"team": "sea"}
    assert motet(server, "adapters", "pin", "pirate") == 0 and server.adapters["pirate"].pinned
    assert motet(server, "adapters", "list") == 0
    table = capsys.readouterr().out.splitlines()
    assert " ".join(table[1].split()) == "NAME STATE KIND RANK SIZE VERSION OWNER VISIBILITY DISPLAY NAME"
    assert table[2].split() == ["pirate", "active", "pinned", "lora", "8", "4.0", "KiB", DIGEST[:12], "unspecified"]
    assert motet(server, "adapters", "get", "pirate") == 0
    assert "held by:      arena w0\n" in capsys.readouterr().out
    assert motet(server, "adapters", "versions", "pirate") == 0
    assert len(capsys.readouterr().out.splitlines()) == 4
    assert motet(server, "adapters", "activate", "pirate", "ef" * 32) == 0
    assert capsys.readouterr().out == "activated pirate: version 2 (efefefefefef)\n"
    assert motet(server, "adapters", "unpin", "pirate") == 0 and not server.adapters["pirate"].pinned
    digest = "ab" * 32
    assert motet(server, "adapters", "remove", "--no-wait", "--version", digest, "pirate") == 0
    assert server.requests[-1].digest == digest
    assert capsys.readouterr().out.splitlines()[-1] == f"removed pirate version {digest}"
    assert motet(server, "adapters", "remove", "--no-wait", "pirate") == 0
    assert capsys.readouterr().out.splitlines()[-1] == "removed pirate"
    assert motet(server, "adapters", "get", "pirate") == exits.NOT_FOUND


def test_versions_say_which_one_requests_get(server: ScriptedServer, capsys: Capture) -> None:
    adapter = server.adapters["pirate"] = make_adapter("pirate")
    adapter.canary.digest, adapter.canary.per_mille = "ef" * 32, 25
    server.version_digests = ["ef" * 32, DIGEST, "cd" * 32]
    assert motet(server, "adapters", "versions", "pirate") == 0
    title, *versions = capsys.readouterr().out.splitlines()
    assert title.split()[:4] == ["NUMBER", "DIGEST", "ROLE", "KIND"]
    roles = [line.split()[2 : line.split().index("lora")] for line in versions]
    assert roles == [["canary", "2.5%"], ["active"], []]


@pytest.mark.parametrize("is_check", [False, True])
@pytest.mark.parametrize(
    ("change", "previous", "line"),
    [
        ("CREATED", None, "registered pirate: version 2 (abababababab)"),
        (
            "VERSION_ADDED",
            1,
            "registered pirate: version 2 (abababababab) is new and active now; before: version 1 (cdcdcdcdcdcd); "
            "back to it: motet adapters activate pirate cdcdcdcdcdcd",
        ),
        (
            "VERSION_ACTIVATED",
            3,
            "registered pirate: version 2 (abababababab) was known and is active again; "
            "before: version 3 (cdcdcdcdcdcd); back to it: motet adapters activate pirate cdcdcdcdcdcd",
        ),
        ("VERSION_ACTIVATED", 2, "registered pirate: version 2 (abababababab) could not be served and can be again"),
        ("NONE", 2, "pirate is unchanged: version 2 (abababababab) is active already"),
    ],
)
def test_adapters_add_says_which_version_is_active_and_which_was(
    server: ScriptedServer,
    capsys: Capture,
    tmp_path: Path,
    change: str,
    previous: int | None,
    line: str,
    is_check: bool,
) -> None:
    (tmp_path / "adapter_config.json").write_text("{}")
    (tmp_path / "adapter_model.safetensors").write_bytes(b"weights")
    server.registration = adapters_pb2.Registration(change=f"REGISTRATION_CHANGE_{change}")
    if previous is not None:
        digest = DIGEST if previous == 2 else "cd" * 32
        server.registration.previous_version.MergeFrom(adapters_pb2.AdapterVersion(digest=digest, number=previous))
    assert motet(server, "adapters", "add", *(["--check"] if is_check else []), "pirate", str(tmp_path)) == 0
    printed = capsys.readouterr().out
    if is_check and change != "NONE":
        wanted = line.partition("; back to it")[0].removeprefix("registered pirate: ")
        assert printed == f"checked pirate, nothing was stored; registering would give: {wanted}\n"
    else:
        assert printed == line + "\n"


@pytest.mark.parametrize(
    "argv", [["--from", "hub/pirate@v1", "pirate"], ["pirate", "--from", "hub/pirate@v1"]], ids=["before", "behind"]
)
def test_adapters_add_from_a_root_prints_a_line_for_each_tenth(
    server: ScriptedServer, capsys: Capture, argv: list[str]
) -> None:
    server.downloads.extend([(0, 0), *((done << 20, 100 << 20) for done in (0, 5, 25, 26, 100))])
    options = ["--label", "team=sea", "--share-with", "labs", "--keep-active", "--check"]
    assert motet(server, "adapters", "add", *argv, *options) == 0
    created = server.requests[0]
    assert (created.adapter_id, created.source, dict(created.labels)) == ("pirate", "hub/pirate@v1", {"team": "sea"})
    assert list(created.shared_with) == ["labs"] and created.rollout.keep_active and created.validate_only
    printed = capsys.readouterr()
    assert printed.err.splitlines() == ["downloading 25.0 MiB of 100.0 MiB", "downloading 100.0 MiB of 100.0 MiB"]
    assert printed.out.startswith("checked pirate, nothing was stored; ")


def test_adapters_add_changes_one_line_on_a_terminal_and_leaves_it_before_an_error(
    server: ScriptedServer, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stderr.isatty", lambda: True, raising=False)
    server.downloads.extend([(1 << 20, 2 << 20), (1000, 2 << 20), (1 << 20, 2 << 20)])
    code = grpc.StatusCode.UNAVAILABLE.value[0]
    server.operation_error = status_pb2.Status(code=code, message="'hub/pirate': the Hub sent 503")
    assert motet(server, "adapters", "add", "pirate", "--from", "hub/pirate") == exits.UNAVAILABLE
    lines = capsys.readouterr().err.split("\n")
    assert lines[0].split("\r") == [
        *("", "downloading 1.0 MiB of 2.0 MiB", "downloading 1000 B of 2.0 MiB ", "downloading 1.0 MiB of 2.0 MiB")
    ]
    assert lines[1].startswith("motet: 'hub/pirate': the Hub sent 503")


def test_adapters_add_needs_a_directory_or_a_source_and_not_both(
    server: ScriptedServer, capsys: Capture, tmp_path: Path
) -> None:
    with pytest.raises(SystemExit) as ended:
        motet(server, "adapters", "add", "pirate")
    assert ended.value.code == exits.USAGE and "DIR" in capsys.readouterr().err
    for argv in ([str(tmp_path), "--from", "hub/pirate"], ["--from", "hub/pirate", str(tmp_path)]):
        assert motet(server, "adapters", "add", "pirate", *argv) == exits.REFUSED
        assert "--from: is in place of DIR" in capsys.readouterr().err
    assert server.requests == []


@pytest.mark.parametrize("is_staged", [False, True])
def test_adapters_add_shows_the_warnings_of_the_version_that_it_registered(
    server: ScriptedServer, capsys: Capture, is_staged: bool
) -> None:
    version = adapters_pb2.AdapterVersion(digest=DIGEST, number=3, warnings=["names another base model"])
    server.registration = adapters_pb2.Registration(change="REGISTRATION_CHANGE_CREATED", version=version)
    if is_staged:
        server.registration.change = adapters_pb2.REGISTRATION_CHANGE_VERSION_STAGED
    assert motet(server, "adapters", "add", "pirate", "--from", "hub/pirate", "--json") == 0
    printed = capsys.readouterr()
    assert printed.err == "motet: warning: names another base model\n"
    registered = json.loads(printed.out)["registration"]["version"]
    assert registered["warnings"] == ["names another base model"]
    server.adapters["pirate"] = make_adapter("pirate")
    server.adapters["pirate"].active_version.CopyFrom(version)
    assert motet(server, "adapters", "get", "pirate") == 0
    assert "warning:      names another base model\n" in capsys.readouterr().out


def test_adapters_are_shared_by_add_and_update(server: ScriptedServer, capsys: Capture, tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text("{}")
    (tmp_path / "adapter_model.safetensors").write_bytes(b"x")
    shared = ["--share-with", "labs", "--share-with", "ops", "--owner", "acme"]
    assert motet(server, "adapters", "add", "pirate", str(tmp_path), *shared) == 0
    adapter = server.adapters["pirate"]
    assert adapter.visibility == adapters_pb2.ADAPTER_VISIBILITY_SHARED and adapter.shared_with == ["labs", "ops"]
    capsys.readouterr()
    assert motet(server, "adapters", "get", "pirate") == 0
    assert "ownership:    of acme, shared with labs, ops\n" in capsys.readouterr().out
    assert motet(server, "adapters", "list") == 0
    heads, row = capsys.readouterr().out.splitlines()
    assert row[heads.index("OWNER") :].split()[:2] == ["acme", "shared"]
    assert motet(server, "adapters", "update", "pirate", "--visibility", "public", "--label", "a=b") == 0
    assert list(server.requests[-1].update_mask.paths) == ["labels", "visibility"]
    assert motet(server, "adapters", "update", "pirate", "--share-with", "labs") == 0
    assert list(server.requests[-1].update_mask.paths) == ["visibility", "shared_with"]
    assert capsys.readouterr().out.splitlines()[-1] == "updated pirate: of acme, shared with labs"
    assert motet(server, "adapters", "update", "pirate", "--owner", "") == 0
    assert list(server.requests[-1].update_mask.paths) == ["owner"]
    assert capsys.readouterr().out == "updated pirate: of no tenant, shared with labs\n"
    assert motet(server, "adapters", "update", "pirate") == exits.REFUSED
    assert "nothing to change" in capsys.readouterr().err


def test_adapters_json_is_one_line_per_adapter(server: ScriptedServer, capsys: Capture) -> None:
    server.adapters.update({name: make_adapter(name) for name in ("a", "b")})
    assert motet(server, "adapters", "list", "--json") == 0
    assert [json.loads(line)["id"] for line in capsys.readouterr().out.splitlines()] == ["a", "b"]


def test_adapters_add_of_a_wrong_directory_or_label_is_refused(
    server: ScriptedServer, capsys: Capture, tmp_path: Path
) -> None:
    assert motet(server, "adapters", "add", "pirate", str(tmp_path)) == exits.REFUSED
    assert "has no adapter_config.json" in capsys.readouterr().err
    assert motet(server, "adapters", "add", "pirate", str(tmp_path), "--label", "team") == exits.REFUSED
    assert "give KEY=VALUE" in capsys.readouterr().err and server.requests == []
