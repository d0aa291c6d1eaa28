"""Handshakes that fail, and odd headers, write nothing: whoever reaches the port could fill the disk with lines."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from pathlib import Path

import pytest

from tests.control_plane.server_processes import STEP_S, checkpoint, ready_line, start
from tests.fakes.authority import LOCALHOST, Authority
from tests.fakes.raw_http2 import raw_call

NUM = 20


async def fail(port: int, context: ssl.SSLContext | None, server_name: str | None = None) -> None:
    """Connects as no client may, and waits until the server has closed the connection."""
    with contextlib.suppress(OSError):
        reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=context, server_hostname=server_name)
        writer.write(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(100))
        await reader.read()
        writer.close()


@pytest.mark.parametrize("command", [("control_plane",), ("motet", "control-plane")], ids=["module", "motet"])
async def test_failed_handshakes_are_not_logged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: tuple[str, ...]
) -> None:
    monkeypatch.delenv("GRPC_VERBOSITY", raising=False)  # as an operator starts it
    authority = Authority()
    cert, key = authority.issue(*LOCALHOST).write(tmp_path)
    (tmp_path / "ca.pem").write_bytes(authority.pem)
    without_certificate = ssl.create_default_context(cafile=tmp_path / "ca.pem")
    without_certificate.check_hostname = False
    server = await start(
        *command,
        *("--model", str(checkpoint(tmp_path / "model")), "--data-dir", str(tmp_path / "data")),
        *("--host-cache", "memory", "--listen", "127.0.0.1:0", "--worker-listen", "127.0.0.1:0"),
        *("--tls-cert", str(cert), "--tls-key", str(key), "--tls-client-ca", str(tmp_path / "ca.pem")),
        cwd=tmp_path,
    )
    try:
        match = await ready_line(server, r" ready clients=127\.0\.0\.1:(\d+) workers=127\.0\.0\.1:(\d+)")
        async with asyncio.timeout(STEP_S):
            for port in match.groups():
                for context, name in ((None, None), (without_certificate, None), (without_certificate, "a.test")):
                    for _ in range(NUM):
                        await fail(int(port), context, name)
        server.terminate()
        _, err = await asyncio.wait_for(server.communicate(), STEP_S)
    finally:
        if server.returncode is None:
            server.kill()
            await server.communicate()
    assert b"stopped" in err
    # Lines of gRPC begin with a letter and the date, those of the log with the year.
    assert [line for line in err.decode().splitlines() if not line.startswith("2")] == []


@pytest.mark.parametrize("frontends", ["0", "2"])
async def test_headers_that_are_not_utf8_neither_close_a_port_nor_fill_the_log(tmp_path: Path, frontends: str) -> None:
    """Before any credential: the method's name closed the port for good, and each other header wrote tracebacks."""
    (tmp_path / "keys.json").write_text('{"keys": []}')
    server = await start(
        "control_plane",
        *("--model", str(checkpoint(tmp_path / "model")), "--data-dir", str(tmp_path / "data")),
        *("--host-cache", "memory", "--listen", "127.0.0.1:0", "--worker-listen", "127.0.0.1:0"),
        *("--api-keys", "keys.json", "--frontends", frontends),
        cwd=tmp_path,
    )
    try:
        match = await ready_line(server, r" ready clients=(\S+) workers=(\S+)$")
        async with asyncio.timeout(STEP_S):
            for port in match.groups():
                for path in (b"/\xff", b"/motet.v1.StatusService/\xff\xfe", b"/motet.worker.v1.WorkerService/\xff"):
                    response = await raw_call(port, path)
                    assert response.is_ended and b"Method not found!" in response.headers, (port, path)
            for _ in range(NUM):
                odd = (b"motet-tenant", b"\xff\x00\r\n"), (b"authorization", b"Bearer \xff"), (b"traceparent", b"\xff")
                response = await raw_call(match[1], b"/motet.v1.StatusService/GetStatus", *odd)
                assert b"is not a valid tenant" in response.headers
                response = await raw_call(match[1], b"/motet.v1.StatusService/GetStatus", *odd[1:])
                assert b"the token is not one that this server knows" in response.headers
        server.terminate()
        _, err = await asyncio.wait_for(server.communicate(), STEP_S)
    finally:
        if server.returncode is None:
            server.kill()
            await server.communicate()
    assert b"stopped" in err
    lines = err.decode().splitlines()
    assert [line for line in lines if not line.startswith("2") or " ERROR " in line or "\xff" in line] == []
