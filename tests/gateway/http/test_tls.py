"""TLS on both sides of the gateway."""

from __future__ import annotations

import asyncio
import ssl
from pathlib import Path

import httpx
import pytest

from tests.e2e.harness import System
from tests.fakes.authority import Authority
from tests.gateway.gateway_process import Gateway
from tests.makers import make_checkpoint

WAIT_S = 60.0


def test_callers_and_the_server_are_reached_over_tls_with_the_right_authority_only(tmp_path: Path) -> None:
    ours, others = Authority(), Authority()
    cert, key = (str(path) for path in ours.issue("localhost", "127.0.0.1").write(tmp_path))
    checkpoint = make_checkpoint(tmp_path / "model", arch="llama")
    with System(checkpoint, tmp_path, control_flags=["--tls-cert", cert, "--tls-key", key]) as system:
        for authority, status in ((ours, 200), (others, 503)):
            ca = authority.write(tmp_path, f"ca-{status}")
            flags = ["--tls-cert", cert, "--tls-key", key, "--server-tls-ca", str(ca), "--server-absence-s", "1"]
            with Gateway(system.address, tmp_path, flags) as gateway:
                context = ssl.create_default_context(cafile=str(ours.write(tmp_path)))
                with httpx.Client(base_url=f"https://{gateway.address}", verify=context, timeout=WAIT_S) as http:
                    assert http.get("/healthz").status_code == 200
                    assert http.get("/readyz").status_code == status
                with pytest.raises(httpx.HTTPError):
                    httpx.get(f"{gateway.url}/healthz", timeout=WAIT_S)
                with pytest.raises(httpx.ConnectError, match="CERTIFICATE_VERIFY_FAILED"):
                    context = ssl.create_default_context(cafile=str(others.write(tmp_path, "other")))
                    httpx.get(f"https://{gateway.address}/healthz", verify=context, timeout=WAIT_S)


async def test_every_handshake_of_many_at_once_succeeds_and_a_failed_one_leaves_its_place(tmp_path: Path) -> None:
    """The client's first bytes are often there before the loop's next turn."""
    authority = Authority()
    cert, key = (str(path) for path in authority.issue("localhost", "127.0.0.1").write(tmp_path))
    context = ssl.create_default_context(cafile=str(authority.write(tmp_path)))
    flags = ["--tls-cert", cert, "--tls-key", key, "--max-connections", "60"]
    with Gateway("127.0.0.1:1", tmp_path, flags) as gateway:
        host, _, port = gateway.address.rpartition(":")

        async def ask() -> bytes:
            reader, writer = await asyncio.open_connection(host, int(port), ssl=context)
            writer.write(b"GET /healthz HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
            head = await reader.readuntil(b"\r\n")
            writer.close()
            return head

        for _ in range(4):
            for _ in range(30):  # no TLS at all
                reader, writer = await asyncio.open_connection(host, int(port))
                writer.write(b"GET /healthz HTTP/1.1\r\n\r\n")
                assert await reader.read() in (b"", b"\x15\x03\x01\x00\x02\x02F"), "an alert at most"
                writer.close()
            heads = await asyncio.wait_for(asyncio.gather(*(ask() for _ in range(50))), WAIT_S)
            assert set(heads) == {b"HTTP/1.1 200 OK\r\n"}
