"""Both clients and the command line send the key with every call, and say what to do where it does not count."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import grpc
import pytest
from google.rpc import error_details_pb2
from motet import InvalidArgument, PermissionDenied, Unauthenticated
from motet.cli.main import main

from tests.client.conftest import Driver
from tests.client.scripted_server import WORKER_LOST, ScriptedServer, abort, make_adapter, playing
from tests.client.test_cli import Capture

KEY = "motet_k1_secret"
UNAUTHENTICATED = error_details_pb2.ErrorInfo(reason="UNAUTHENTICATED")


def sent(server: ScriptedServer) -> list[tuple[str, Any]]:
    """Of every call: its method and key."""
    return [(method, metadata.get("authorization")) for method, metadata in server.metadata]


def adapter_files(directory: Path) -> Path:
    (directory / "adapter_config.json").write_text("{}")
    (directory / "adapter_model.safetensors").write_bytes(b"weights")
    return directory


def test_every_kind_of_call_has_the_key_and_the_tenant(server: ScriptedServer, driver: Driver, tmp_path: Path) -> None:
    driver.settings |= {"api_key": KEY, "tenant": "acme"}
    server.scripts.append(playing([1, 2]))
    server.adapters["pirate"] = make_adapter("pirate")
    driver.generate()
    driver.run(lambda client: client.status())
    driver.run(lambda client: client.adapters.register("new", adapter_files(tmp_path)))
    driver.run(lambda client: client.adapters.delete("pirate"))
    methods = ["Generate", "GetStatus", "UploadAdapter", "DeleteAdapter", "GetOperation", "GetOperation"]
    assert sent(server) == [(method, f"Bearer {KEY}") for method in methods]
    assert {metadata["motet-tenant"] for _, metadata in server.metadata} == {"acme"}


def test_without_a_key_nothing_is_sent(server: ScriptedServer, driver: Driver) -> None:
    driver.run(lambda client: client.status())
    assert sent(server) == [("GetStatus", None)]


def test_each_attempt_has_the_key_of_its_moment(server: ScriptedServer, driver: Driver) -> None:
    keys = iter(["one", "two", "three", "four"])
    driver.settings["api_key"] = lambda: next(keys)

    def lost(request: Any, context: grpc.ServicerContext) -> Any:
        yield from playing([1, 2, 3])(request, context) if request.resume_from.ids else []
        abort(context, grpc.StatusCode.UNAVAILABLE, "the worker was lost", WORKER_LOST)

    server.scripts += [lost, playing([1, 2])]
    driver.generate()
    failures = [True, False]

    def fail_once(context: grpc.ServicerContext) -> None:
        if failures.pop(0):
            abort(context, grpc.StatusCode.UNAVAILABLE, "the store is away", WORKER_LOST)

    server.unary_error = fail_once  # type: ignore[assignment]  # it returns the second time
    driver.run(lambda client: client.status())
    assert sent(server) == [
        ("Generate", "Bearer one"),
        ("Generate", "Bearer two"),
        ("GetStatus", "Bearer three"),
        ("GetStatus", "Bearer four"),
    ]


@pytest.mark.parametrize(
    ("code", "error"),
    [(grpc.StatusCode.UNAUTHENTICATED, Unauthenticated), (grpc.StatusCode.PERMISSION_DENIED, PermissionDenied)],
)
def test_a_refused_key_is_not_sent_again(
    server: ScriptedServer, driver: Driver, code: grpc.StatusCode, error: type[Exception]
) -> None:
    driver.settings["api_key"] = KEY
    server.unary_error = lambda context: abort(context, code, "refused", UNAUTHENTICATED)
    server.scripts.append(lambda request, context: abort(context, code, "refused", UNAUTHENTICATED))
    with pytest.raises(error) as caught:
        driver.run(lambda client: client.status())
    with pytest.raises(error):
        driver.generate()
    assert sent(server) == [("GetStatus", f"Bearer {KEY}"), ("Generate", f"Bearer {KEY}")]
    assert KEY not in str(caught.value) and driver.sleeps == []


def test_a_function_that_fails_ends_the_call(server: ScriptedServer, driver: Driver) -> None:
    def refresh() -> str:
        raise RuntimeError("the identity provider is away")

    driver.settings["api_key"] = refresh
    with pytest.raises(RuntimeError, match="identity provider"):
        driver.run(lambda client: client.status())
    with pytest.raises(RuntimeError, match="identity provider"):
        driver.generate()
    assert sent(server) == []


def test_a_client_of_another_machine_is_not_made_without_tls(driver: Driver) -> None:
    driver.target, driver.settings["api_key"] = "gpu.example:50051", KEY
    with pytest.raises(InvalidArgument, match=r"api_key: would be sent in plaintext to gpu\.example:50051"):
        driver.run(lambda client: None)
    driver.settings["allow_plaintext_key"] = True
    driver.run(lambda client: None)


# ---- the command line ----


def motet(server: ScriptedServer, *argv: str) -> int:
    return main(["--server", server.target, *argv])


def test_the_command_takes_the_key_from_a_file_or_the_environment(
    server: ScriptedServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    one.write_text("of-flag\n")
    two.write_text("of-file-variable\n")
    monkeypatch.setenv("MOTET_API_KEY_FILE", str(two))
    assert motet(server, "status", "--json") == 0
    monkeypatch.setenv("MOTET_API_KEY", "of-variable")
    assert motet(server, "status", "--json") == 0
    assert motet(server, "--api-key-file", str(one), "status", "--json") == 0
    assert motet(server, "adapters", "list", "--api-key-file", str(one)) == 0
    keys = [key for _, key in sent(server)]
    assert keys == ["Bearer of-file-variable", "Bearer of-variable", "Bearer of-flag", "Bearer of-flag"]


@pytest.mark.parametrize("key", ["motet_k3v9q2m7xa_" + "aB3" * 14 + "x", "eyJhbGciOiJFUzI1NiJ9.eyJzdWIiOiJhIn0.c2ln"])
@pytest.mark.parametrize("flag", ["--api-key-file", "--api-key"])
def test_a_key_in_place_of_its_file_is_not_repeated(
    server: ScriptedServer, capsys: Capture, flag: str, key: str
) -> None:
    assert motet(server, flag, key, "status") == 3
    error = capsys.readouterr().err
    assert key not in error and "--api-key-file: is a key or a token, and the name of a file is expected" in error
    assert "replace it" in error and sent(server) == []


def test_a_key_file_that_cannot_be_used_is_named(server: ScriptedServer, capsys: Capture, tmp_path: Path) -> None:
    empty, binary = tmp_path / "empty", tmp_path / "binary"
    empty.touch()
    binary.write_bytes(b"\xff\xfe")
    for file, reason in ((empty, "is empty"), (binary, "it is not text"), (tmp_path / "none", "No such file")):
        assert motet(server, "--api-key-file", str(file), "status") == 3
        assert f"--api-key-file: {file} " in (line := capsys.readouterr().err) and reason in line
    assert server.metadata == []


def test_a_refused_call_says_how_to_give_a_key(server: ScriptedServer, capsys: Capture) -> None:
    server.unary_error = lambda context: abort(
        context, grpc.StatusCode.UNAUTHENTICATED, "this server needs a credential", UNAUTHENTICATED
    )
    assert motet(server, "status") == 3
    assert capsys.readouterr().err == (
        "motet: this server needs a credential; --api-key-file FILE or MOTET_API_KEY gives the key [UNAUTHENTICATED]\n"
    )


def test_a_key_for_another_machine_needs_tls_or_insecure(capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOTET_API_KEY", KEY)
    assert main(["--server", "motet.invalid:50051", "status"]) == 3
    line = capsys.readouterr().err
    assert "in plaintext (from MOTET_API_KEY) to motet.invalid:50051" in line and "--insecure" in line
    assert KEY not in line
    assert main(["--server", "motet.invalid:50051", "--insecure", "status"]) == 6
