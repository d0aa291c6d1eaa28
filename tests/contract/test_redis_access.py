"""How Redis is reached: passwords from files, files for TLS, nothing of it in a text."""

from __future__ import annotations

import datetime
import ssl
from pathlib import Path

import pytest
import redis
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import rsa

from contract.redis_access import (
    MAX_PASSWORD_BYTES,
    PasswordUnreadable,
    RedisAccess,
    RedisTls,
    find_url_mistake,
    read_password,
    reason_of,
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
    options = RedisAccess(url="redis://m%65@host:1/0?protocol=3", password_file=password_file).options()
    assert options["url"] == "redis://host:1/0?protocol=3"
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
    ("url", "expected"),
    [
        ("rediss://host?client_name=a@b", {"host": "host", "client_name": "a@b"}),
        ("unix:///run/a@b.sock", {"path": "/run/a@b.sock"}),
        ("redis://m%65@host/1", {"host": "host", "db": 1, "username": "me"}),
        ("redis://host?db=2&username=me&password=other", {"host": "host", "db": 2, "username": "me"}),
    ],
)
def test_the_password_of_a_file_goes_nowhere_else(url: str, expected: dict[str, object], password_file: Path) -> None:
    access = RedisAccess(url=url, password_file=password_file)
    made = redis.Redis.from_url(access.with_password()).connection_pool.connection_kwargs
    assert {name: made[name] for name in expected} == expected and made["password"] == "p@ss/w:rd"
    pool = redis.Redis.from_url(**access.options()).connection_pool
    pool.make_connection()  # refuses a user or a password beside a provider
    credentials = pool.connection_kwargs["credential_provider"].get_credentials()
    assert credentials == (("me", "p@ss/w:rd") if "username" in expected else ("p@ss/w:rd",))
    assert pool.connection_kwargs.get("client_name") == expected.get("client_name")


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


def test_a_key_of_another_kind_is_not_that_of_the_certificate(tmp_path: Path) -> None:
    cert, key = Authority().issue("own.example").write(tmp_path)
    rsa_cert, rsa_key = write_rsa(tmp_path, 2048)
    assert RedisTls(cert=rsa_cert, key=rsa_key).find_mistake() is None
    mistake = RedisTls(cert=cert, key=rsa_key).find_mistake()
    assert mistake == f"--redis-tls-key: {rsa_key} does not belong to --redis-tls-cert"
    mistake = RedisTls(cert=rsa_cert, key=key).find_mistake()
    assert mistake == f"--redis-tls-key: {key} does not belong to --redis-tls-cert"


def test_a_certificate_with_a_short_key_is_a_mistake_of_the_certificate(tmp_path: Path) -> None:
    cert, key = write_rsa(tmp_path, 1024)
    mistake = RedisTls(cert=cert, key=key).find_mistake() or ""
    assert mistake.startswith(f"--redis-tls-cert: {cert} is too weak for OpenSSL (EE_KEY_TOO_SMALL)")


def write_rsa(directory: Path, bits: int) -> tuple[Path, Path]:
    """A certificate that signs itself, and its key."""
    key = rsa.generate_private_key(65537, bits)
    name, now = x509.Name([]), datetime.datetime.now(datetime.UTC)
    builder = x509.CertificateBuilder(name, name, key.public_key(), 1, now, now + datetime.timedelta(days=1))
    cert_file, key_file = directory / "rsa.pem", directory / "rsa.key"
    cert_file.write_bytes(builder.sign(key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM))
    plain = serialization.NoEncryption()
    key_file.write_bytes(key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, plain))
    return cert_file, key_file


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("UNEXPECTED_EOF_WHILE_READING", "Redis closes the connection; it may want a certificate"),
        ("SSLV3_ALERT_HANDSHAKE_FAILURE", "Redis refuses the handshake"),
        ("TLSV1_ALERT_PROTOCOL_VERSION", "Redis refuses the versions of TLS"),
        ("TLSV13_ALERT_CERTIFICATE_REQUIRED", "give --redis-tls-cert"),
        ("NEW_IN_OPENSSL", "TLS fails: NEW_IN_OPENSSL"),
    ],
)
def test_what_openssl_reports_becomes_a_sentence(name: str, words: str) -> None:
    error = ssl.SSLError(1, "text")
    error.reason = name
    outer = redis.ConnectionError("Error 1 connecting")
    outer.__cause__ = error
    assert words in reason_of(outer) and words in reason_of(error)


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("http://h", "must begin with redis://"),
        ("REDIS://h", "must begin with redis://"),
        (" redis://h", "must begin with redis://"),
        ("re\tdis://h", "must begin with redis://"),
        ("rediss:h", "must begin with redis://"),
        ("rediss:/h", "must begin with redis://"),
        ("redis://h\n", "has a blank or a control character"),
        ("redis://:p\tw@h", "has a blank or a control character"),
        ("unix:///my run/s", "as %XX, such as %20"),
        ("redis://:a/b@h", "cannot be read"),
    ],
)
def test_a_url_that_redis_py_reads_in_another_way_is_refused(url: str, words: str) -> None:
    assert words in (find_url_mistake(url) or "")


@pytest.mark.parametrize("scheme", ["redis://host", "rediss://host", "unix:///s"])
@pytest.mark.parametrize(
    "name",
    ["colour", "credential_provider", "host", "max_connections", "retry_on_timeout", "socket_timeout"],
)
def test_an_option_that_could_undo_what_motet_sets_is_refused_by_its_name(scheme: str, name: str) -> None:
    mistake = find_url_mistake(f"{scheme}?db=1&{name}=planted") or ""
    assert mistake.startswith(f"has an option that Motet does not take: {name}; remove it; the options are client_name")
    assert "planted" not in mistake


def test_every_option_that_is_taken_makes_a_connection() -> None:
    options = "client_name=motet&db=3&health_check_interval=5&protocol=3&username=me&password=p%2Fw"
    for url in (
        f"redis://h?{options}&socket_keepalive=1",
        f"rediss://h?{options}",
        f"unix:///s?{options}",
        "unix:///s",
    ):
        assert find_url_mistake(url) is None
        redis.Redis.from_url(url).connection_pool.make_connection()
    assert "does not take: socket_keepalive" in (find_url_mistake("unix:///s?socket_keepalive=1") or "")
    for option in ("db=x", "protocol=4", "health_check_interval=soon", "client_name=a%20b"):
        assert f"the option {option.partition('=')[0]} " in (find_url_mistake(f"redis://h?{option}") or "")


def test_a_part_of_a_password_is_not_named_as_an_option() -> None:
    mistake = find_url_mistake("redis://me:12?plan=ted@host") or ""
    assert mistake.startswith("has an option that Motet does not take; remove it") and "plan" not in mistake


@pytest.mark.parametrize(
    "option",
    ["ssl_cert_reqs=none", "ssl_check_hostname=false", "ssl_ca_certs=/ca", "db=1&%73sl_cert_reqs=none"],
)
def test_an_option_of_the_url_cannot_change_how_the_server_is_checked(option: str) -> None:
    """redis-py takes options of the URL before arguments."""
    assert "has an option of TLS" in (find_url_mistake(f"rediss://host:6380/0?{option}") or "")
    assert find_url_mistake("rediss://host:6380/0?socket_keepalive=1") is None
