"""How a process reaches Redis: the URL, a file with the password, files for TLS; and what errors of Redis mean.

Both sides connect by it. The password's file is read at every new connection: a password that was changed needs no
restart. Imports redis-py only to read its errors: `options()` are keyword arguments of its `from_url`.
"""

from __future__ import annotations

import re
import ssl
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, quote, unquote

from contract.redaction import has_password, redacted, redacted_url, split_url
from contract.settings.flags import flag_of, optional_path, setting

SCHEMES = ("redis", "rediss", "unix")
MAX_PASSWORD_BYTES = 4096
_ARGUMENTS = re.compile(r",? with args beginning with:.*", re.DOTALL)
# What OpenSSL calls it when the other end refuses or does not speak TLS, by the end of the name.
_TLS_REASONS = {
    "CERTIFICATE_REQUIRED": "Redis wants a certificate of this side; give --redis-tls-cert",
    "UNKNOWN_CA": "Redis does not trust the authority of --redis-tls-cert",
    "ALERT_CERTIFICATE_EXPIRED": "Redis refuses --redis-tls-cert, which has expired",
    "WRONG_VERSION_NUMBER": "the server there does not speak TLS",
}
# X509_V_ERR_...: a certificate is self-signed, one of its chain is, its issuer is not at hand.
_FOREIGN_AUTHORITY = (18, 19, 20)


@dataclass(frozen=True, slots=True, kw_only=True)
class RedisTls:
    """Files for a rediss:// URL: flags of both sides. The server's certificate and its host name are always checked."""

    ca: Path | None = setting(
        "certificates that a rediss:// server is checked with",
        None,
        name="--redis-tls-ca",
        shown_default="those of the system",
        parse=optional_path,
        metavar="FILE",
    )
    cert: Path | None = setting(
        "this side's certificate for a rediss:// server",
        None,
        name="--redis-tls-cert",
        shown_default="none",
        parse=optional_path,
        metavar="FILE",
    )
    key: Path | None = setting(
        "key of --redis-tls-cert",
        None,
        name="--redis-tls-key",
        shown_default="none",
        parse=optional_path,
        metavar="FILE",
    )

    def find_mistake(self) -> str | None:
        """Flag and reason where the files cannot be used."""
        for name in ("ca", "cert", "key"):
            path: Path | None = getattr(self, name)
            if path is not None and not path.is_file():
                return f"{flag_of(RedisTls, name)}: {path} is not a file"
            if path is not None and (mistake := _find_unreadable(path)) is not None:
                return f"{flag_of(RedisTls, name)}: {path} {mistake}"
        if (self.cert is None) is not (self.key is None):
            missing = flag_of(RedisTls, "key" if self.key is None else "cert")
            return f"{missing}: is missing; a certificate needs its key"
        for name in ("ca", "cert"):
            path = getattr(self, name)
            if path is not None and not _has_certificates(path):
                return f"{flag_of(RedisTls, name)}: {path} has no complete certificates in PEM"
        if self.cert is not None and self.key is not None:
            mistake = _find_wrong_key(self.cert, self.key)
            return None if mistake is None else f"{flag_of(RedisTls, 'key')}: {self.key} {mistake}"
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class RedisAccess:
    """One Redis and the user who uses it."""

    url: str = field(repr=False)  # may hold a password
    password_file: Path | None = None
    tls: RedisTls = RedisTls()

    def __str__(self) -> str:
        return redacted_url(self.url)

    @property
    def has_password(self) -> bool:
        """Whether there is a password to log in with."""
        return self.password_file is not None or has_password(self.url)

    def with_password(self) -> str:
        """The URL with the password in it. Raises PasswordUnreadable."""
        if self.password_file is None:
            return self.url
        scheme, _, rest = self.url.partition("://")
        user, at, host = rest.rpartition("@")
        return f"{scheme}://{user if at else ''}:{quote(read_password(self.password_file), safe='')}@{host}"

    def options(self) -> dict[str, Any]:
        """Keyword arguments of redis.Redis.from_url, `url` among them. Raises ValueError that repeats no secret."""
        parts = split_url(self.url)
        options: dict[str, Any] = {"url": self.url}
        if self.password_file is not None:
            # redis-py takes a user in the URL, or a provider of the user and the password.
            userinfo, _, host = parts.netloc.rpartition("@")
            query = f"?{parts.query}" if parts.query else ""
            options["url"] = f"{parts.scheme}://{host}{parts.path}{query}"
            options["credential_provider"] = PasswordFile(unquote(userinfo.partition(":")[0]), self.password_file)
        if parts.scheme == "rediss":
            files = {"ssl_ca_certs": self.tls.ca, "ssl_certfile": self.tls.cert, "ssl_keyfile": self.tls.key}
            options |= {name: str(path) for name, path in files.items() if path is not None}
            options |= {"ssl_cert_reqs": "required", "ssl_check_hostname": True}
        return options


def find_url_mistake(url: str) -> str | None:
    """Why a URL cannot be used, without repeating it; None if it can."""
    try:
        parts = split_url(url)
    except ValueError as error:
        return str(error)
    if parts.scheme not in SCHEMES:
        return "must begin with redis://, rediss:// or unix://"
    # redis-py takes options of the URL before arguments: ?ssl_cert_reqs=none would accept any server.
    if parts.scheme == "rediss" and any(name.startswith("ssl") for name, _ in parse_qsl(parts.query, True)):
        return (
            "has an option of TLS (ssl...); remove it: the server's certificate and its host name are always checked, "
            "and --redis-tls-ca, --redis-tls-cert and --redis-tls-key name the files"
        )
    return None


def _find_unreadable(path: Path) -> str | None:
    try:
        path.open("rb").close()
    except OSError as error:
        return f"cannot be read: {error.strerror}"
    return None


def _has_certificates(path: Path) -> bool:
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(path)
    except ssl.SSLError:
        return False
    return True


def _find_wrong_key(cert: Path, key: Path) -> str | None:
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_cert_chain(cert, key, _refuse_password)
    except _EncryptedError:
        return "is encrypted; give a key without a password"
    except ssl.SSLError as error:
        is_other = error.reason == "KEY_VALUES_MISMATCH"
        return f"does not belong to {flag_of(RedisTls, 'cert')}" if is_other else "has no complete private key in PEM"
    return None


def _refuse_password() -> str:
    """Called for a key that is encrypted. Without it OpenSSL would wait for a password at the terminal."""
    raise _EncryptedError


class _EncryptedError(Exception):
    pass


class PasswordUnreadable(OSError):
    """The file of a password cannot be read, or has none; repeats nothing of its content."""


class PasswordFile:
    """User and password for redis-py, which calls `get_credentials` for every new connection."""

    def __init__(self, user: str, path: Path) -> None:
        self._user = user
        self._path = path

    def get_credentials(self) -> tuple[str, str] | tuple[str]:
        """User and password, or the password alone where the URL names no user. Raises PasswordUnreadable."""
        password = read_password(self._path)
        return (self._user, password) if self._user else (password,)


def read_password(path: Path) -> str:
    """The one line of the file, without the line's end. Raises PasswordUnreadable."""
    try:
        with path.open("rb") as file:
            content = file.read(MAX_PASSWORD_BYTES + 1)
    except OSError as error:
        raise PasswordUnreadable(f"{path} cannot be read: {error.strerror}") from error
    if len(content) > MAX_PASSWORD_BYTES:
        raise PasswordUnreadable(f"{path} is longer than {MAX_PASSWORD_BYTES} bytes; it must have the password alone")
    try:
        password = content.decode("utf-8").rstrip("\r\n")
    except UnicodeDecodeError:
        raise PasswordUnreadable(f"{path} is not UTF-8 text") from None
    if not password or "\n" in password:
        raise PasswordUnreadable(f"{path} must have one line with the password")
    return password


def reason_of(error: BaseException) -> str:
    """What an error of redis-py means, for people who may see no address: the log has the error itself."""
    import redis

    if "HELLO must be called with the client already authenticated" in str(error):
        return "Redis refuses: it wants a password"
    if isinstance(error, PasswordUnreadable):
        return "the file with the password of Redis cannot be read"
    if isinstance(error, (redis.AuthenticationError, redis.ResponseError)):
        return f"Redis refuses: {without_arguments(error)}"
    if isinstance(error, redis.InvalidResponse):
        return "the server there is not a Redis"
    if isinstance(error, (TimeoutError, redis.TimeoutError)):
        return "Redis does not respond in time"
    cause = error.__cause__ or error.__context__
    for found in (error, cause):
        if isinstance(found, ssl.SSLError):
            return f"TLS fails: {_tls_reason(found)}"
        if isinstance(found, OSError) and found.strerror:
            return f"Redis cannot be reached: {found.strerror}"
    if isinstance(error, redis.ConnectionError):
        return "Redis cannot be reached, or closes the connection"
    return f"unexpected {type(error).__name__}"


def without_arguments(error: BaseException) -> str:
    """What Redis says, without the arguments of the command, which it repeats: a password may be among them."""
    return redacted(_ARGUMENTS.sub("", str(error)))[:200]


def _tls_reason(error: ssl.SSLError) -> str:
    if isinstance(error, ssl.SSLCertVerificationError):
        advice = "; --redis-tls-ca must have its authority" if error.verify_code in _FOREIGN_AUTHORITY else ""
        return f"{error.verify_message}{advice}"
    name = getattr(error, "reason", None) or ""
    for end, meaning in _TLS_REASONS.items():
        if name.endswith(end):
            return meaning
    # With TLS 1.3 a client learns this late: the server closes the connection after the client's handshake.
    return name or "Redis closes the connection; it may want a certificate of this side (--redis-tls-cert)"
