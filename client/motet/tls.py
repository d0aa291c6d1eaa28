"""TLS for whoever connects: three files made into gRPC's credentials, and handshakes that fail in plain words.

Standard library and grpc only. The SDK and the worker use it.
"""

from __future__ import annotations

import os
import re
import ssl
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import TypeAlias

import grpc

PathLike: TypeAlias = str | os.PathLike[str]

NAMES = ("tls_ca", "tls_cert", "tls_key")  # of the three files, in the SDK
_BEGIN, _END = b"-----BEGIN ", b"-----END "
_FIRST_CERTIFICATE = re.compile(r"-----BEGIN CERTIFICATE-----.*?-----END CERTIFICATE-----", re.DOTALL)


class TlsError(ValueError):
    """The files cannot be used. The text begins with the parameter or flag of the file."""


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """The files of one client, PEM. Read each time that a channel is made from them."""

    ca: Path  # authorities that sign the server's certificate
    cert: Path | None = None  # of the client, followed by its chain
    key: Path | None = None  # of `cert`
    names: tuple[str, str, str] = NAMES  # what the user calls the three
    wall_clock: Callable[[], float] = field(default=time.time, compare=False)

    def stamp(self) -> tuple[object, ...]:
        """Differs once a file was changed or replaced."""
        return tuple(map(_stamp_of, self._paths()))

    def credentials(self) -> grpc.ChannelCredentials:
        """What the files say at present, checked as a whole. Raises TlsError."""
        before = self.stamp()
        ca, *pair = (self._read(path, name) for path, name in zip(self._paths(), self.names, strict=False))
        self._check_ca(ca)
        if pair:
            self._check_pair(pair[0])
        if self.stamp() != before:
            raise TlsError(f"{self.names[0]}: the files of TLS change while they are read")
        return grpc.ssl_channel_credentials(ca, *reversed(pair))

    def not_after_s(self) -> float | None:
        """Until when the client's own certificate is valid, wall clock. None without one. Raises TlsError."""
        return None if self.cert is None else _not_after_s(self._read(self.cert, self.names[1]))

    def _paths(self) -> tuple[Path, ...]:
        return (self.ca,) if self.cert is None or self.key is None else (self.ca, self.cert, self.key)

    def _read(self, path: Path, name: str) -> bytes:
        try:
            return path.read_bytes()
        except OSError as error:
            raise TlsError(f"{name}: {path} cannot be read: {error.strerror}") from error

    def _check_ca(self, ca: bytes) -> None:
        try:
            _check_blocks(ca)
            ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(cadata=ca.decode("ascii"))
        except (ValueError, ssl.SSLError) as error:
            raise TlsError(f"{self.names[0]}: {self.ca} has no complete certificates in PEM") from error

    def _check_pair(self, cert: bytes) -> None:
        assert self.cert is not None and self.key is not None, "both or none"
        _, cert_name, key_name = self.names
        try:
            _check_blocks(cert)
            not_after_s = _not_after_s(cert)
        except (ValueError, IndexError) as error:
            raise TlsError(f"{cert_name}: {self.cert} has no complete certificate in PEM") from error
        if not_after_s <= self.wall_clock():
            until = datetime.fromtimestamp(not_after_s, UTC)
            raise TlsError(f"{cert_name}: the certificate has expired: it was valid until {until:%Y-%m-%d %H:%M} UTC")
        try:
            ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_cert_chain(self.cert, self.key, _refuse_password)
        except _EncryptedError as error:
            raise TlsError(f"{key_name}: {self.key} is encrypted; give a key without a password") from error
        except ssl.SSLError as error:
            is_other = error.reason == "KEY_VALUES_MISMATCH"
            what = f"does not belong to {cert_name}" if is_other else "has no complete private key in PEM"
            raise TlsError(f"{key_name}: {self.key} {what}") from error
        except OSError as error:
            raise TlsError(f"{key_name}: {self.key} cannot be read: {error.strerror}") from error


def tls_files(
    ca: PathLike | None,
    cert: PathLike | None,
    key: PathLike | None,
    names: tuple[str, str, str] = NAMES,
) -> TlsFiles | None:
    """The files of a client, or None for a client without TLS. Raises TlsError if one is missing or cannot be used."""
    if not ca:
        for given, name in zip((cert, key), names[1:], strict=True):
            if given:
                raise TlsError(f"{name}: needs {names[0]}, too, which turns TLS on")
        return None
    for given, other, name, needed in ((cert, key, names[1], names[2]), (key, cert, names[2], names[1])):
        if given and not other:
            raise TlsError(f"{name}: needs {needed}, too; give both")
    return TlsFiles(Path(ca), Path(cert) if cert else None, Path(key) if key else None, names)


def handshake_error(
    details: str, *, has_tls: bool, has_certificate: bool, names: tuple[str, str, str] = NAMES
) -> str | None:
    """Why no connection was made, from gRPC's own text, in words of a user. None if TLS is not the reason."""
    for part, cause in _CAUSES.items():
        if part in details:
            return cause.replace("CA", names[0])
    if not any(part in details for part in _CLOSED):
        return None
    if not has_tls:
        return f"the server closed the connection at once; if its port has TLS, give its authority with {names[0]}"
    if has_certificate:
        return "the server closed the connection during the TLS handshake: it does not accept the client's certificate"
    return (
        "the server closed the connection during the TLS handshake: it may need a certificate of the client; give "
        f"{names[1]} and {names[2]}"
    )


_CLOSED = ("Socket closed", "Connection reset by peer", "Broken pipe")
# Parts of gRPC's text, the most exact first.
_CAUSES = {
    "WRONG_VERSION_NUMBER": "the port has no TLS; give the port with TLS, or leave TLS out",
    "Hostname Verification Check failed": "the server's certificate is not for the name or address that was dialled; "
    "dial a name that the certificate has",
    "certificate has expired": "the server's certificate has expired",
    "certificate is not yet valid": "the server's certificate is not valid yet; compare the clocks of both machines",
    "CERTIFICATE_VERIFY_FAILED": "the server's certificate is not signed by an authority of the file given with CA",
    "NO_COMMON_SIGNATURE_ALGORITHMS": "the key of the certificate is of a kind that gRPC does not use; take EC P-256, "
    "P-384 or RSA",
    "Failed to create security handshaker": "gRPC cannot use the files of TLS; check that they are complete",
}


class _EncryptedError(Exception):
    """The key has a password."""


def _refuse_password() -> str:  # else OpenSSL would read it from the terminal
    raise _EncryptedError


def _stamp_of(path: Path) -> object:
    try:
        stat = path.stat()
    except OSError:
        return None
    return stat.st_mtime_ns, stat.st_size, stat.st_ino


def _check_blocks(pem: bytes) -> None:
    """Raise ValueError if a PEM block is cut off: OpenSSL would pass it over."""
    if not pem.count(_BEGIN) == pem.count(_END) > 0:
        raise ValueError("a PEM block is cut off")


# ---- the end of a certificate's validity, without a package that reads certificates ----


def _not_after_s(pem: bytes) -> float:
    """When the first certificate expires, seconds since 1970. Raises ValueError or IndexError if there is none."""
    match = _FIRST_CERTIFICATE.search(pem.decode("ascii"))
    if match is None:
        raise ValueError("no certificate in PEM")
    der = ssl.PEM_cert_to_DER_cert(match[0])
    # Certificate and TBSCertificate are sequences; then come [0] version, serial number, signature, issuer, validity.
    at = _content(der, _content(der, 0)[0])[0]
    for _ in range(4 if der[at] == 0xA0 else 3):
        at = _content(der, at)[1]
    not_before = _content(der, at)[0]
    start, end = _content(der, _content(der, not_before)[1])
    text = der[start:end].decode("ascii")
    # UTCTime has two digits of the year: 50 and above are of 1950 to 1999 (RFC 5280, 4.1.2.5.1).
    full = text if len(text) == 15 else f"{19 if int(text[:2]) >= 50 else 20}{text}"
    return datetime.strptime(full, "%Y%m%d%H%M%SZ").replace(tzinfo=UTC).timestamp()


def _content(der: bytes, at: int) -> tuple[int, int]:
    """Where the content of the element at `at` begins and ends."""
    length, start = der[at + 1], at + 2
    if length >= 0x80:  # the number of bytes that hold the length
        num_bytes = length & 0x7F
        length, start = int.from_bytes(der[start : start + num_bytes]), start + num_bytes
    return start, start + length
