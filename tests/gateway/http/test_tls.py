"""TLS on both sides of the gateway."""

from __future__ import annotations

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
