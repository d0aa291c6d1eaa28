"""How Redis is reached: passwords from files, files for TLS, nothing of it in a text."""

from __future__ import annotations

from pathlib import Path

import pytest
import redis
from cryptography.hazmat.primitives import serialization

from contract.redis_access import (
    MAX_PASSWORD_BYTES,
    PasswordUnreadable,
    RedisAccess,
    RedisTls,
    find_url_mistake,
    read_password,
)
from tests.fakes.authority import Authority


@pytest.fixture
def password_file(tmp_path: Path) -> Path:
    file = tmp_path / "password"
    file.write_text("p@ss/w:rd\n")
    return file


def test_neither_repr_nor_text_has_the_password(password_file: Path) -> None:
    access = RedisAccess(url="redis://me:planted@host:1/0?password=planted")
    assert "planted" not in f"{access!r} {access}" and "host:1" in str(access)


def test_the_password_of_a_file_goes_with_the_user_of_the_url(password_file: Path) -> None:
    options = RedisAccess(url="redis://m%65@host:1/0?socket_timeout=3", password_file=password_file).options()
    assert options["url"] == "redis://host:1/0?socket_timeout=3"
    assert options["credential_provider"].get_credentials() == ("me", "p@ss/w:rd")
    password_file.write_text("changed")
    assert options["credential_provider"].get_credentials() == ("me", "changed")
    nameless = RedisAccess(url="redis://host:1", password_file=password_file).options()
    assert nameless["credential_provider"].get_credentials() == ("changed",)


def test_a_url_with_the_password_of_a_file_logs_in_as_the_file_does(password_file: Path) -> None:
    for url in ("redis://me@host:1/0", "redis://host:1/0"):
        whole = RedisAccess(url=url, password_file=password_file).with_password()
        made = redis.Redis.from_url(whole).connection_pool.connection_kwargs
        assert (made["password"], made["host"]) == ("p@ss/w:rd", "host")
        assert made.get("username") == ("me" if "@" in url else None)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "must have one line"),
        (b"a\nb\n", "must have one line"),
        (b"\xff\xfe", "is not UTF-8"),
        (b"x" * (MAX_PASSWORD_BYTES + 1), "is longer than 4096 bytes"),
    ],
)
def test_a_file_that_is_no_password_is_refused_without_its_content(tmp_path: Path, content: bytes, words: str) -> None:
    file = tmp_path / "password"
    file.write_bytes(content)
    with pytest.raises(PasswordUnreadable, match=words):
        read_password(file)
    with pytest.raises(PasswordUnreadable, match="cannot be read: No such file"):
        read_password(tmp_path / "other")


def test_certificates_and_host_names_are_always_checked(tmp_path: Path) -> None:
    tls = RedisTls(ca=tmp_path / "ca", cert=tmp_path / "cert", key=tmp_path / "key")
    options = RedisAccess(url="rediss://host", tls=tls).options()
    assert (options["ssl_cert_reqs"], options["ssl_check_hostname"]) == ("required", True)
    assert options["ssl_ca_certs"] == str(tmp_path / "ca") and options["ssl_keyfile"] == str(tmp_path / "key")
    assert not any(name.startswith("ssl") for name in RedisAccess(url="redis://host", tls=tls).options())


def test_files_that_cannot_be_used_are_named_by_flag(tmp_path: Path) -> None:
    authority = Authority()
    ca, (cert, key) = authority.write(tmp_path), authority.issue("own.example").write(tmp_path)
    _, other_key = authority.issue("other.example").write(tmp_path, "other")
    assert RedisTls(ca=ca, cert=cert, key=key).find_mistake() is None
    assert RedisTls(ca=tmp_path).find_mistake() == f"--redis-tls-ca: {tmp_path} is not a file"
    assert (RedisTls(cert=cert).find_mistake() or "").startswith("--redis-tls-key: is missing")
    assert (RedisTls(key=key).find_mistake() or "").startswith("--redis-tls-cert: is missing")
    assert RedisTls(ca=key).find_mistake() == f"--redis-tls-ca: {key} has no complete certificates in PEM"
    mistake = RedisTls(cert=key, key=key).find_mistake()
    assert mistake == f"--redis-tls-cert: {key} has no complete certificates in PEM"
    mistake = RedisTls(cert=cert, key=other_key).find_mistake()
    assert mistake == f"--redis-tls-key: {other_key} does not belong to --redis-tls-cert"
    mistake = RedisTls(cert=cert, key=cert).find_mistake()
    assert mistake == f"--redis-tls-key: {cert} has no complete private key in PEM"


def test_an_encrypted_key_is_refused_and_no_password_is_read_from_the_terminal(tmp_path: Path) -> None:
    cert, key = Authority().issue("own.example").write(tmp_path)
    whole = serialization.load_pem_private_key(key.read_bytes(), None)
    encryption = serialization.BestAvailableEncryption(b"planted")
    key.write_bytes(whole.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, encryption))
    mistake = RedisTls(cert=cert, key=key).find_mistake()
    assert mistake == f"--redis-tls-key: {key} is encrypted; give a key without a password"


def test_a_url_of_another_kind_is_refused() -> None:
    assert find_url_mistake("unix:///s") is None
    assert "must begin with redis://" in (find_url_mistake("http://h") or "")
    assert "cannot be read" in (find_url_mistake("redis://:a/b@h") or "")


@pytest.mark.parametrize(
    "option",
    ["ssl_cert_reqs=none", "ssl_check_hostname=false", "ssl_ca_certs=/ca", "db=1&%73sl_cert_reqs=none"],
)
def test_an_option_of_the_url_cannot_change_how_the_server_is_checked(option: str) -> None:
    """redis-py takes options of the URL before arguments."""
    assert "has an option of TLS" in (find_url_mistake(f"rediss://host:6380/0?{option}") or "")
    assert find_url_mistake("rediss://host:6380/0?socket_keepalive=1") is None
