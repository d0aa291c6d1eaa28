"""The certificate that a port presents, and the one list of authorities that sign the certificates of its peers.

The three files are read together and take effect together. gRPC fetches them before every handshake and gets what was
read last, so running streams keep their connection and the next connection has the new certificate.
"""

from __future__ import annotations

import logging
import stat
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

import grpc
from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat, load_pem_private_key

from control_plane.access.watched_files import WatchedFiles

logger = logging.getLogger(__name__)

_BEGIN, _END = b"-----BEGIN ", b"-----END "
_CURVES = ("secp256r1", "secp384r1")  # TLS of gRPC 1.85 knows no other: it fails each handshake with P-521 or Ed25519
MIN_RSA_BITS = 2048


@dataclass(frozen=True, slots=True)
class ServerCertificates:
    """What one port needs for TLS. Every part is checked, and the key belongs to the certificate."""

    chain: bytes  # PEM: the port's certificate and those between it and an authority
    key: bytes = field(repr=False)  # PEM
    client_ca: bytes | None  # PEM of the authorities that sign the certificates of peers; None: peers present none
    not_after_s: float  # wall clock

    def __str__(self) -> str:
        return f"valid until {datetime.fromtimestamp(self.not_after_s, UTC):%Y-%m-%d %H:%M} UTC"


def parse(
    chain: bytes, key: bytes, client_ca: bytes | None = None, *, wall_clock: Callable[[], float] = time.time
) -> ServerCertificates:
    """Raises ValueError, whose text names what is wrong and has nothing of the key."""
    certificates = _certificates(chain, "the certificate's file")
    leaf = certificates[0]
    try:
        private = load_pem_private_key(key, None)
    except TypeError as error:
        raise ValueError("the key is encrypted; give a key without a password, readable by the server alone") from error
    except Exception as error:  # its text might repeat the file
        raise ValueError("the key's file has no complete private key in PEM") from error
    _check_kind(private)
    try:
        certified = leaf.public_key()
    except (ValueError, UnsupportedAlgorithm) as error:
        raise ValueError("the certificate's key is of an unknown kind") from error
    own, its = (
        each.public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo) for each in (private.public_key(), certified)
    )
    if own != its:
        raise ValueError("the key does not belong to the certificate")
    not_after = leaf.not_valid_after_utc
    if not_after.timestamp() <= wall_clock():
        raise ValueError(f"the certificate has expired: it was valid until {not_after:%Y-%m-%d %H:%M} UTC")
    if client_ca is not None:
        _certificates(client_ca, "the file of authorities")
    return ServerCertificates(chain, key, client_ca, not_after.timestamp())


def watch(cert: Path, key: Path, client_ca: Path | None, *, port: str) -> WatchedFiles[ServerCertificates]:
    """The files of a port. Raises OSError or ValueError. `port` names the port in the log."""
    if key.stat().st_mode & stat.S_IROTH:
        logger.warning("private key readable by every user of this machine file=%s; chmod 600 it", key)
    paths = [cert, key] if client_ca is None else [cert, key, client_ca]
    files = WatchedFiles(paths, parse, what=f"certificate of the {port} port")
    files.on_change(lambda value: logger.info("certificate of the %s port %s", port, value))
    return files


def credentials(files: WatchedFiles[ServerCertificates]) -> grpc.ServerCredentials:
    """Credentials of a port that follow the files.

    With authorities for peers, only a peer whose certificate they signed gets a connection. gRPC for Python either
    demands certificates or requests none. So a certificate that a handler sees has always been verified.
    """
    served = files.value

    def fetch() -> grpc.ServerCertificateConfiguration | None:
        nonlocal served
        # No file is read here: a handshake waits for this. None, not the same again: gRPC would build everything anew
        # for each handshake (grpc#13188).
        current = files.value
        if current is served:
            return None
        served = current
        return _configuration(current)

    return grpc.dynamic_ssl_server_credentials(
        _configuration(served),
        fetch,  # type: ignore[arg-type]  # the stubs forget None
        require_client_authentication=served.client_ca is not None,
    )


def _configuration(value: ServerCertificates) -> grpc.ServerCertificateConfiguration:
    return grpc.ssl_server_certificate_configuration([(value.key, value.chain)], root_certificates=value.client_ca)


def _certificates(pem: bytes, what: str) -> list[x509.Certificate]:
    """All certificates of a file. One that is cut off is not passed over, as `cryptography` alone would do."""
    try:
        found = x509.load_pem_x509_certificates(pem)
    except (ValueError, x509.InvalidVersion) as error:
        raise ValueError(f"{what} has no complete certificate in PEM") from error
    if not len(found) == pem.count(_BEGIN) == pem.count(_END):
        raise ValueError(f"{what} has {pem.count(_BEGIN)} PEM blocks, of which {len(found)} are complete certificates")
    return found


def _check_kind(key: object) -> None:
    if isinstance(key, rsa.RSAPrivateKey) and key.key_size >= MIN_RSA_BITS:
        return
    if isinstance(key, ec.EllipticCurvePrivateKey) and key.curve.name in _CURVES:
        return
    raise ValueError(f"a key of this kind is not used; make one of EC P-256 or P-384, or RSA from {MIN_RSA_BITS} bits")
