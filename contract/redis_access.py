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
from urllib.parse import parse_qsl, quote, unquote, urlencode

from contract.redaction import has_password, redacted, redacted_url, split_url
from contract.settings.flags import flag_of, optional_path, setting

_PREFIXES = ("redis://", "rediss://", "unix://")  # redis-py compares literally; urlsplit would take REDIS:// too
# Options of a URL, and what their values look like. redis-py takes them before arguments, so that none may be here that
# would change Motet's limits of time and number, how the server is checked, or the file of the password.
_OPTIONS = {
    "client_name": r"[!-~]+",
    "db": r"[0-9]{1,9}",
    "health_check_interval": r"[0-9]{1,9}",
    "password": r".*",
    "protocol": r"[23]",
    "socket_keepalive": r".*",
    "username": r".*",
}
_NO_OPTIONS_OF_UNIX = ("socket_keepalive",)
MAX_PASSWORD_BYTES = 4096
_NAME = re.compile(r"[a-z][a-z_]{0,39}", re.IGNORECASE)
_ARGUMENTS = re.compile(r",? with args beginning with:.*", re.DOTALL)
_IT_CLOSES = "Redis closes the connection; it may want a certificate of this side (--redis-tls-cert)"
# Ends of OpenSSL's names of errors, and what each means.
_TLS_REASONS = {
    "CERTIFICATE_REQUIRED": "Redis wants a certificate of this side; give --redis-tls-cert",
    "UNKNOWN_CA": "Redis does not trust the authority of --redis-tls-cert",
    "ALERT_CERTIFICATE_EXPIRED": "Redis refuses --redis-tls-cert, which has expired",
    "ALERT_HANDSHAKE_FAILURE": (
        "Redis refuses the handshake; it may want a certificate of this side (--redis-tls-cert), or other ciphers"
    ),
    "ALERT_PROTOCOL_VERSION": "Redis refuses the versions of TLS that this side speaks, which are 1.2 and 1.3",
    "UNEXPECTED_EOF_WHILE_READING": _IT_CLOSES,
    "WRONG_VERSION_NUMBER": "the server there does not speak TLS",
}
# OpenSSL's names for a key that is not that of the certificate, the last two if it is not of the same kind.
_OTHER_KEY = ("KEY_VALUES_MISMATCH", "KEY_TYPE_MISMATCH", "NO_CERTIFICATE_ASSIGNED")
_TOO_WEAK = ("KEY_TOO_SMALL", "MD_TOO_WEAK")
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
            return _find_wrong_pair(self.cert, self.key)
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
        scheme, user, rest = self._split_user()
        return f"{scheme}://{quote(user, safe='')}:{quote(read_password(self.password_file), safe='')}@{rest}"

    def options(self) -> dict[str, Any]:
        """Keyword arguments of redis.Redis.from_url, `url` among them. Raises ValueError that repeats no secret."""
        scheme, user, rest = self._split_user()
        options: dict[str, Any] = {"url": self.url}
        if self.password_file is not None:
            # redis-py takes a user in the URL, or a provider of the user and the password.
            options["url"] = f"{scheme}://{rest}"
            options["credential_provider"] = PasswordFile(user, self.password_file)
        if scheme == "rediss":
            files = {"ssl_ca_certs": self.tls.ca, "ssl_certfile": self.tls.cert, "ssl_keyfile": self.tls.key}
            options |= {name: str(path) for name, path in files.items() if path is not None}
            options |= {"ssl_cert_reqs": "required", "ssl_check_hostname": True}
        return options

    def _split_user(self) -> tuple[str, str, str]:
        """The scheme, the user, and what follows: the host and the rest, without a user or a password."""
        parts = split_url(self.url)
        userinfo, _, host = parts.netloc.rpartition("@")
        query = parse_qsl(parts.query)
        user = unquote(userinfo.partition(":")[0]) or dict(reversed(query)).get("username", "")
        query = [(name, value) for name, value in query if name not in ("username", "password")]
        return parts.scheme, user, f"{host}{parts.path}{f'?{urlencode(query, quote_via=quote)}' if query else ''}"


def find_url_mistake(url: str) -> str | None:
    """Why a URL cannot be used, without repeating it; None if it can."""
    if not url.startswith(_PREFIXES):
        return "must begin with redis://, rediss:// or unix://"
    if any(char.isspace() or not char.isprintable() for char in url):
        return "has a blank or a control character; remove it, or write it as %XX, such as %20 for a blank"
    try:
        parts = split_url(url)
    except ValueError as error:
        return str(error)
    known = [name for name in _OPTIONS if parts.scheme != "unix" or name not in _NO_OPTIONS_OF_UNIX]
    for name, value in parse_qsl(parts.query, keep_blank_values=True):
        # ?ssl_cert_reqs=none would accept any server.
        if parts.scheme == "rediss" and name.startswith("ssl"):
            return (
                "has an option of TLS (ssl...); remove it: the server's certificate and its host name are always "
                "checked, and --redis-tls-ca, --redis-tls-cert and --redis-tls-key name the files"
            )
        if name not in known:
            # After a "?" in a password that is not written as %3F, its rest would be the name of an option.
            shown = f": {name}" if _NAME.fullmatch(name) and "@" not in parts.query else ""
            return f"has an option that Motet does not take{shown}; remove it; the options are {', '.join(known)}"
        if value and not re.fullmatch(_OPTIONS[name], value, re.DOTALL):
            return f"has a value of the option {name} that Redis cannot take"
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


def _find_wrong_pair(cert: Path, key: Path) -> str | None:
    of_key = f"{flag_of(RedisTls, 'key')}: {key}"
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_cert_chain(cert, key, _refuse_password)
    except _EncryptedError:
        return f"{of_key} is encrypted; give a key without a password"
    except ssl.SSLError as error:
        reason = error.reason or ""
        if reason.endswith(_TOO_WEAK):
            return f"{flag_of(RedisTls, 'cert')}: {cert} is too weak for OpenSSL ({reason}); make one with a longer key"
        if reason in _OTHER_KEY:
            return f"{of_key} does not belong to {flag_of(RedisTls, 'cert')}"
        return f"{of_key} has no complete private key in PEM"
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
    return name or _IT_CLOSES
