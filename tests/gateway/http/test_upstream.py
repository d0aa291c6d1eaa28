"""Whose call a request becomes."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest
import trustme
from motet import Unauthenticated

from gateway.http.keys import set_key
from gateway.http.settings import HttpSettings
from gateway.http.upstream import Upstream


@pytest.fixture
def certificate(tmp_path: Path) -> dict[str, Path]:
    """Settings of a gateway that has a certificate."""
    authority = trustme.CA()
    own = authority.issue_cert("gateway.example.org")
    files = {name: tmp_path / name for name in ("server_tls_ca", "server_tls_cert", "server_tls_key")}
    authority.cert_pem.write_to_path(files["server_tls_ca"])
    own.cert_chain_pems[0].write_to_path(files["server_tls_cert"])
    own.private_key_pem.write_to_path(files["server_tls_key"])
    return files


async def test_a_request_without_a_key_is_no_call_of_the_gateways_certificate(certificate: dict[str, Path]) -> None:
    upstream = Upstream(HttpSettings(**certificate))  # type: ignore[arg-type]  # paths alone
    set_key("")
    with pytest.raises(Unauthenticated, match="Bearer KEY"):
        _ = upstream.client
    with pytest.raises(Unauthenticated):
        await upstream.check_key()
    set_key("motet_k1_x")
    assert upstream.client is not None
    await upstream.close()


async def test_a_request_without_a_key_passes_where_the_operator_says_so(certificate: dict[str, Path]) -> None:
    upstream = Upstream(HttpSettings(**certificate, allow_keyless=True))  # type: ignore[arg-type]  # paths alone
    set_key("")
    assert upstream.client is not None
    await upstream.close()


async def test_a_server_that_is_gone_or_says_nothing_is_soon_known_not_to_respond(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A probe does not wait as a request does; a server that hangs was taken for one that responds."""
    monkeypatch.setattr("gateway.http.upstream.PROBE_S", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        upstream = Upstream(HttpSettings(server=address, server_absence_s=3600))
        assert not await upstream.is_reachable()
    assert not await upstream.is_reachable()
    await upstream.close()


async def test_a_gateway_without_a_certificate_has_no_rights_to_give() -> None:
    upstream = Upstream(HttpSettings())
    set_key("")
    assert upstream.client is not None
    await upstream.close()
