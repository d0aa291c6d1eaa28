"""Which flags need which, and which ports may listen without protection."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from control_plane.access.settings import AccessSettings

LOCAL, ALL = "127.0.0.1:1", "0.0.0.0:2"


def access(names: Sequence[str], file: Path, *, insecure: bool = False) -> AccessSettings:
    given: dict[str, Any] = dict.fromkeys(names, file)
    return AccessSettings(**given, insecure=insecure)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "file.pem"
    path.touch()
    return path


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["tls_cert"], "--tls-cert: needs --tls-key, too; give both"),
        (["tls_key"], "--tls-key: needs --tls-cert, too; give both"),
        (["tls_client_ca"], "--tls-client-ca: needs --tls-cert and --tls-key, which turn TLS on"),
        (["worker_tls_cert"], "--worker-tls-cert: needs --worker-tls-key, too; give both"),
        (["worker_tls_key"], "--worker-tls-key: needs --worker-tls-cert, too; give both"),
        (["worker_tls_client_ca"], "--worker-tls-client-ca: needs --worker-tls-cert and --worker-tls-key, which"),
        (["worker_allow", "worker_tls_cert", "worker_tls_key"], "--worker-allow: needs --worker-tls-client-ca; only a"),
        (["scaler_tls_client_ca"], "--scaler-tls-client-ca: needs --tls-cert and --tls-key, which turn TLS on"),
        (["tls_deny", "tls_cert", "tls_key"], "--tls-deny: needs --tls-client-ca, --worker-tls-client-ca or --scaler-"),
        (["client_identities", "tls_cert", "tls_key"], "--client-identities: needs --tls-client-ca; otherwise"),
    ],
)
def test_a_flag_without_those_that_it_needs_is_refused(file: Path, given: list[str], message: str) -> None:
    with pytest.raises(ValueError) as caught:
        access(given, file)
    assert str(caught.value).startswith(message)


def test_each_way_to_prove_who_one_is_turns_authentication_on(file: Path) -> None:
    assert not AccessSettings().has_authentication
    assert AccessSettings(api_keys=file).has_authentication
    assert AccessSettings(jwt_issuer="i", jwt_audience="a", jwt_jwks="jwks.json").has_authentication
    assert access(["tls_cert", "tls_key", "tls_client_ca"], file).has_authentication


def test_a_file_that_does_not_exist_is_refused(file: Path) -> None:
    with pytest.raises(ValueError, match=r"--tls-key: .*none\.pem is not a file that can be read"):
        AccessSettings(tls_cert=file, tls_key=file.with_name("none.pem"))


def test_ports_of_this_machine_need_nothing() -> None:
    AccessSettings().check_addresses("localhost:1", "[::1]:2")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ([], "--listen: 0.0.0.0:2 is reached from other machines and has no TLS: give --tls-cert and --tls-key, or an"),
        (
            ["tls_cert", "tls_key"],
            "--listen: 0.0.0.0:2 is reached from other machines and has no authentication: ",
        ),
        (["tls_cert", "tls_key", "tls_client_ca"], ""),
        (["tls_cert", "tls_key", "api_keys"], ""),
    ],
)
def test_the_clients_port_for_other_machines_needs_tls_and_authentication(
    file: Path, given: list[str], message: str
) -> None:
    settings = access(given, file)
    if not message:
        settings.check_addresses(ALL, LOCAL)
        return
    with pytest.raises(ValueError) as caught:
        settings.check_addresses(ALL, LOCAL)
    assert str(caught.value).startswith(message) and "--insecure" in str(caught.value)
    access(given, file, insecure=True).check_addresses(ALL, LOCAL)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ([], "--worker-listen: 0.0.0.0:2 is reached from other machines and has no TLS: give --worker-tls-cert and"),
        (
            ["cert", "key"],
            "--worker-listen: 0.0.0.0:2 is reached from other machines and has no certificates of",
        ),
        (
            ["cert", "key", "client_ca"],
            "--worker-listen: 0.0.0.0:2 is reached from other machines and has no list of",
        ),
    ],
)
def test_the_workers_port_for_other_machines_needs_certificates_and_a_list(
    file: Path, given: list[str], message: str
) -> None:
    names = [f"worker_tls_{name}" for name in given]
    with pytest.raises(ValueError) as caught:
        access(names, file).check_addresses(LOCAL, ALL)
    assert str(caught.value).startswith(message) and "--insecure" in str(caught.value)
    access(names, file, insecure=True).check_addresses(LOCAL, ALL)


def test_a_workers_port_with_certificates_and_a_list_may_listen_anywhere(file: Path) -> None:
    names = ("worker_tls_cert", "worker_tls_key", "worker_tls_client_ca", "worker_allow")
    access(names, file).check_addresses(LOCAL, ALL)


def test_tokens_need_issuer_audience_and_keys() -> None:
    with pytest.raises(ValueError, match="--jwt-issuer: needs --jwt-audience and --jwt-jwks too"):
        AccessSettings(jwt_issuer="i")
    with pytest.raises(ValueError, match="--jwt-audience: needs --jwt-issuer too"):
        AccessSettings(jwt_audience="a", jwt_jwks="jwks.json")


@pytest.mark.parametrize("url", ["https://id.example/jwks?v=1", "http://127.0.0.1:8080/jwks", "http://[::1]/", "a/b"])
def test_keys_come_from_a_file_https_or_this_machine(url: str) -> None:
    settings = AccessSettings(jwt_issuer="i", jwt_audience="a", jwt_jwks=url)
    assert settings.has_jwks_url == ("://" in url)


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("http://id.example/jwks", "id.example is another machine, and http lets"),
        ("http://127.0.0.1.evil.example/", "is another machine"),
        ("https://user:hunter2@id.example/", "is not a URL of the form https://HOST"),
        ("http://127.0.0.1\\@evil.example/", "is not a URL of the form"),
        ("file:///etc/passwd", "is not a URL of the form"),
        ("ftp://id.example/jwks", "is not a URL of the form"),
        ("https://id.example/a b", "is not a URL of the form"),
        ("https:///jwks", "is not a URL of the form"),
    ],
)
def test_other_urls_are_refused_without_repeating_a_password(url: str, message: str) -> None:
    with pytest.raises(ValueError, match="--jwt-jwks: ") as caught:
        AccessSettings(jwt_issuer="i", jwt_audience="a", jwt_jwks=url)
    assert message in str(caught.value) and "hunter2" not in str(caught.value)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ([], "--scaler-listen: 0.0.0.0:2 is reached from other machines and has no TLS: give --tls-cert and --tls-key"),
        (["tls_cert", "tls_key"], "--scaler-listen: 0.0.0.0:2 is reached from other machines and has no certificates "),
        (["tls_cert", "tls_key", "scaler_tls_client_ca"], ""),
    ],
)
def test_the_autoscalers_port_for_other_machines_needs_certificates(file: Path, given: list[str], message: str) -> None:
    settings = access(given, file)
    if not message:
        settings.check_addresses(LOCAL, LOCAL, ALL)
        return
    with pytest.raises(ValueError) as caught:
        settings.check_addresses(LOCAL, LOCAL, ALL)
    assert str(caught.value).startswith(message) and "--insecure" in str(caught.value)
    access(given, file, insecure=True).check_addresses(LOCAL, LOCAL, ALL)
