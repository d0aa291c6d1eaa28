"""TLS of a client: which files are used, when they are read again, and what is said when a handshake fails."""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import serialization
from motet import AsyncClient, Client, InvalidArgument, RetryPolicy, Unavailable
from motet.cli.main import main
from motet.tls import tls_files

from tests.client.conftest import Driver
from tests.client.scripted_server import ScriptedServer, playing, started
from tests.fakes.authority import LOCALHOST, Authority, Issued, overwrite

CA = Authority()
SERVER = CA.issue(*LOCALHOST)
ONCE = RetryPolicy(max_attempts=1)


@contextlib.contextmanager
def serving(own: Issued | None = SERVER, *, client_ca: bytes | None = None) -> Iterator[ScriptedServer]:
    """A server with this certificate; None: without TLS."""
    credentials = None
    if own is not None:
        credentials = grpc.ssl_server_credentials([(own.key, own.cert)], client_ca, client_ca is not None)
    server = ScriptedServer(credentials)
    try:
        yield server
    finally:
        server.stop()


@pytest.fixture
def files(tmp_path: Path) -> dict[str, Any]:
    """Arguments of a client with a certificate of its own."""
    cert, key = CA.issue("alice").write(tmp_path, "client")
    return {"tls_ca": CA.write(tmp_path), "tls_cert": cert, "tls_key": key}


def driver_of(server: ScriptedServer, is_async: bool = False, **settings: Any) -> Driver:
    driver = Driver(server.target, is_async=is_async)
    driver.settings.update(settings)
    return driver


both = pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])


@both
def test_calls_streams_and_uploads_go_over_tls(files: dict[str, Any], tmp_path: Path, is_async: bool) -> None:
    with serving(client_ca=CA.pem) as server:
        driver = driver_of(server, is_async, **files)
        server.status.model.name = "over TLS"
        assert driver.run(lambda client: client.status()).model.name == "over TLS"
        server.scripts.append(playing([1, 2, 3]))
        assert driver.generate()[1].text == "<1><2><3>"
        (tmp_path / "adapter").mkdir()
        for name in ("adapter_config.json", "adapter_model.safetensors"):
            (tmp_path / "adapter" / name).write_bytes(b"{}")
        assert driver.run(lambda client: client.adapters.register("poet", tmp_path / "adapter")).id == "poet"


def identity(context: grpc.ServicerContext) -> str:
    presented: Any = context.auth_context()["x509_subject_alternative_name"]
    return b",".join(presented).decode()


def noting(seen: list[str]) -> Any:
    """For `unary_error`: notes who calls, and lets the call go on."""
    return lambda context: seen.append(identity(context))


def test_changed_files_are_used_by_the_next_call_and_running_streams_go_on(
    files: dict[str, Any], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "motet")
    seen: list[str] = []
    with serving(client_ca=CA.pem) as server, Client(server.target, **files, retry=ONCE) as client:
        server.unary_error = noting(seen)
        server.scripts.append(server.waiting_for_cancel(started()))
        stream = client.generate("hello")
        client.status()
        overwrite(files["tls_cert"], CA.issue("bob").cert)  # and the key is the former one's
        client.status()
        assert "files of TLS not used, the connection stays as it is error=tls_key: " in caplog.text
        CA.issue("carol").write(tmp_path, "client")
        client.status()
        client.status()
        assert seen == ["alice", "alice", "carol", "carol"]
        assert not server.cancelled.is_set()
        stream.close()
        assert server.cancelled.wait(30)


async def test_the_asyncio_client_uses_changed_files_too(files: dict[str, Any], tmp_path: Path) -> None:
    seen: list[str] = []
    with serving(client_ca=CA.pem) as server:
        async with AsyncClient(server.target, **files, retry=ONCE) as client:
            server.unary_error = noting(seen)
            server.scripts.append(server.waiting_for_cancel(started()))
            stream = client.generate("hello")
            await client.status()
            assert await asyncio.to_thread(server.is_waiting.wait, 30)
            CA.issue("bob").write(tmp_path, "client")
            await client.status()
            assert seen == ["alice", "bob"] and not server.cancelled.is_set()
            await stream.aclose()
            assert await asyncio.to_thread(server.cancelled.wait, 30)


@both
def test_a_new_authority_is_used_once_the_file_has_it(files: dict[str, Any], is_async: bool) -> None:
    other = Authority()
    with serving(other.issue(*LOCALHOST)) as server:
        driver = driver_of(server, is_async, tls_ca=files["tls_ca"], retry=ONCE)
        with pytest.raises(Unavailable, match="is not signed by an authority of the file given with tls_ca"):
            driver.run(lambda client: client.status())
        overwrite(files["tls_ca"], CA.pem + other.pem)
        driver.run(lambda client: client.status())


@pytest.mark.parametrize(
    ("own", "settings", "message"),
    [
        (SERVER, {}, "the server closed the connection at once; if its port has TLS, give its authority with tls_ca"),
        (None, {"tls_ca": "ca"}, "the port has no TLS; give the port with TLS, or leave TLS out"),
        (
            Authority().issue(*LOCALHOST),
            {"tls_ca": "ca"},
            "is not signed by an authority of the file given with tls_ca",
        ),
        (CA.issue("other.example"), {"tls_ca": "ca"}, "is not for the name or address that was dialled; dial a name"),
        (CA.issue(*LOCALHOST, lasts=-datetime.timedelta(1)), {"tls_ca": "ca"}, "the server's certificate has expired"),
    ],
    ids=["plaintext against TLS", "TLS against plaintext", "unknown authority", "another name", "expired"],
)
@both
def test_a_handshake_that_fails_is_explained(
    tmp_path: Path, own: Issued | None, settings: dict[str, str], message: str, is_async: bool
) -> None:
    ca = CA.write(tmp_path)
    given = dict.fromkeys(settings, ca)
    with serving(own) as server:
        driver = driver_of(server, is_async, **given, retry=ONCE)
        with pytest.raises(Unavailable) as caught:
            driver.run(lambda client: client.status())
    assert caught.value.reason == "SERVER_UNREACHABLE" and message in caught.value.message
    assert caught.value.message.startswith(f"no Motet server responds at {server.target}: ")


@pytest.mark.parametrize(
    ("with_certificate", "message"),
    [
        (False, "it may need a certificate of the client; give tls_cert and tls_key"),
        (True, "it does not accept the client's certificate"),
    ],
)
def test_a_server_that_needs_another_certificate_is_explained(
    files: dict[str, Any], with_certificate: bool, message: str
) -> None:
    given = files if with_certificate else {"tls_ca": files["tls_ca"]}
    with serving(client_ca=Authority().pem) as server:
        driver = driver_of(server, **given, retry=ONCE)
        with pytest.raises(Unavailable, match=f"closed the connection during the TLS handshake: {message}"):
            driver.run(lambda client: client.status())


def broken(directory: Path, **contents: bytes) -> dict[str, Path]:
    alice = CA.issue("alice")
    given = {"tls_ca": CA.pem, "tls_cert": alice.cert, "tls_key": alice.key} | contents
    paths = {name: directory / name for name in given}
    for name, path in paths.items():
        path.write_bytes(given[name])
    return paths


def encrypted_key() -> bytes:
    key = serialization.load_pem_private_key(SERVER.key, None)
    how = serialization.BestAvailableEncryption(b"password")
    return key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, how)


@pytest.mark.parametrize(
    ("contents", "message"),
    [
        ({"tls_ca": b""}, "tls_ca: .* has no complete certificates in PEM"),
        ({"tls_ca": CA.pem + CA.pem[:50]}, "tls_ca: .* has no complete certificates in PEM"),
        ({"tls_ca": CA.pem.replace(b"M", b"A", 3)}, "tls_ca: .* has no complete certificates in PEM"),
        ({"tls_cert": SERVER.cert[:200]}, "tls_cert: .* has no complete certificate in PEM"),
        ({"tls_cert": b"\xff"}, "tls_cert: .* has no complete certificate in PEM"),
        ({"tls_key": SERVER.key}, "tls_key: .* does not belong to tls_cert"),
        ({"tls_key": SERVER.key[:100]}, "tls_key: .* has no complete private key in PEM"),
        ({"tls_key": encrypted_key()}, "tls_key: .* is encrypted; give a key without a password"),
        (
            {"tls_cert": CA.issue("alice", lasts=-datetime.timedelta(hours=1)).cert},
            "tls_cert: the certificate has expired: it was valid until 20",
        ),
    ],
    ids=[
        "no authority",
        "half an authority",
        "a damaged authority",
        "half a certificate",
        "no certificate",
        "key of another",
        "half a key",
        "encrypted key",
        "expired",
    ],
)
def test_files_that_cannot_be_used_are_refused_when_the_client_is_made(
    tmp_path: Path, contents: dict[str, bytes], message: str
) -> None:
    with pytest.raises(InvalidArgument, match=message) as caught:
        Client(**broken(tmp_path, **contents))  # type: ignore[arg-type]  # the names fit
    assert "PRIVATE" not in str(caught.value)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"tls_cert": "c", "tls_key": "k"}, "tls_cert: needs tls_ca, too, which turns TLS on"),
        ({"tls_ca": "a", "tls_cert": "c"}, "tls_cert: needs tls_key, too; give both"),
        ({"tls_ca": "a", "tls_key": "k"}, "tls_key: needs tls_cert, too; give both"),
        ({"tls_ca": "/does/not/exist"}, "tls_ca: /does/not/exist cannot be read: No such file or directory"),
    ],
)
def test_arguments_that_do_not_belong_together_are_refused(given: dict[str, str], message: str) -> None:
    with pytest.raises(InvalidArgument, match=message):
        Client(**given)  # type: ignore[arg-type]  # the names fit


def test_credentials_of_the_user_and_files_exclude_each_other(files: dict[str, Any]) -> None:
    with pytest.raises(InvalidArgument, match="credentials: is given beside tls_ca; give one of them"):
        Client(credentials=grpc.ssl_channel_credentials(), tls_ca=files["tls_ca"])


def test_the_end_of_a_certificate_is_read_as_cryptography_reads_it(tmp_path: Path) -> None:
    for lasts in (datetime.timedelta(hours=1), datetime.timedelta(days=365 * 40)):  # UTCTime, and GeneralizedTime
        issued = CA.issue("alice", "spiffe://a/b", lasts=lasts)
        cert, key = issued.write(tmp_path, "client")
        files = tls_files(CA.write(tmp_path), cert, key)
        assert files is not None
        assert files.not_after_s() == x509.load_pem_x509_certificate(issued.cert).not_valid_after_utc.timestamp()


def test_the_command_line_takes_files_as_flags_and_from_the_environment(
    files: dict[str, Any], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = [f"--{name.replace('_', '-')}={path}" for name, path in files.items()]
    with serving(client_ca=CA.pem) as server:
        server.status.model.name = "over TLS"
        assert main(["--server", server.target, *flags, "status", "--json"]) == 0
        assert main(["status", "--server", server.target, *flags, "--json"]) == 0
        assert main(["--server", server.target, "status"]) == 6
        for name, path in files.items():
            monkeypatch.setenv(f"MOTET_{name.upper()}", str(path))
        assert main(["--server", server.target, "status", "--json"]) == 0
    printed = capsys.readouterr()
    assert printed.out.count('"over TLS"') == 3
    assert "if its port has TLS, give its authority with tls_ca" in printed.err
