"""Handshakes that fail write nothing: whoever reaches the port could fill the disk with lines."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from pathlib import Path

import pytest

from tests.control_plane.server_processes import STEP_S, checkpoint, ready_line, start
from tests.fakes.authority import LOCALHOST, Authority

NUM = 20


async def fail(port: int, context: ssl.SSLContext | None) -> None:
    """Connects as no client may, and waits until the server has closed the connection."""
    with contextlib.suppress(OSError):
        reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=context)
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
        match = await ready_line(server, r" ready clients=127\.0\.0\.1:(\d+) ")
        async with asyncio.timeout(STEP_S):
            for context in (None, without_certificate):
                for _ in range(NUM):
                    await fail(int(match[1]), context)
        server.terminate()
        _, err = await asyncio.wait_for(server.communicate(), STEP_S)
    finally:
        if server.returncode is None:
            server.kill()
            await server.communicate()
    assert b"stopped" in err
    # Lines of gRPC begin with a letter and the date, those of the log with the year.
    assert [line for line in err.decode().splitlines() if not line.startswith("2")] == []
