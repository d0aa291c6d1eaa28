"""A certificate authority for tests: certificates with any names and times, as files and as bytes."""

from __future__ import annotations

import datetime
import ipaddress
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import grpc
import trustme
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.types import CertificateIssuerPrivateKeyTypes
from cryptography.x509.oid import ExtensionOID

LOCALHOST = ("localhost", "127.0.0.1")


@dataclass(frozen=True)
class Issued:
    """A certificate with its key, PEM, and where they lie once `write` was called."""

    cert: bytes
    key: bytes

    def write(self, directory: Path, name: str = "server") -> tuple[Path, Path]:
        """Both as files; a later certificate of the same name replaces them at once."""
        return write(directory / f"{name}.pem", self.cert), write(directory / f"{name}.key", self.key)

    @property
    def fingerprint(self) -> str:
        return x509.load_pem_x509_certificate(self.cert).fingerprint(hashes.SHA256()).hex()


class Authority:
    """Signs certificates."""

    def __init__(self) -> None:
        ca = trustme.CA(key_type=trustme.KeyType.ECDSA)
        self.pem = ca.cert_pem.bytes()
        self._certificate = x509.load_pem_x509_certificate(self.pem)
        key = serialization.load_pem_private_key(ca.private_key_pem.bytes(), None)
        assert isinstance(key, ec.EllipticCurvePrivateKey)
        self._key: CertificateIssuerPrivateKeyTypes = key

    def issue(
        self,
        *names: str | x509.GeneralName,
        lasts: datetime.timedelta = datetime.timedelta(days=1),
        curve: ec.EllipticCurve | None = None,
        extensions: Sequence[x509.ExtensionType] = (),
    ) -> Issued:
        """A certificate with these subject alternative names; of texts the type is guessed. `lasts` may be past."""
        key = ec.generate_private_key(curve or ec.SECP256R1())
        now = datetime.datetime.now(datetime.UTC)
        builder = (
            x509.CertificateBuilder()
            .subject_name(x509.Name([x509.NameAttribute(x509.NameOID.ORGANIZATION_NAME, "Motet's tests")]))
            .issuer_name(self._certificate.subject)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - datetime.timedelta(days=30))
            .not_valid_after(now + lasts)
        )
        if names:
            builder = builder.add_extension(
                x509.SubjectAlternativeName([_name(name) if isinstance(name, str) else name for name in names]),
                critical=False,
            )
        for extension in extensions:
            builder = builder.add_extension(extension, critical=True)
        certificate = builder.sign(self._key, hashes.SHA256())
        return Issued(
            certificate.public_bytes(serialization.Encoding.PEM),
            key.private_bytes(
                serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
            ),
        )

    def write(self, directory: Path, name: str = "ca") -> Path:
        """The authority's certificate as a file."""
        return write(directory / f"{name}.pem", self.pem)

    def channel_credentials(self, own: Issued | None = None) -> grpc.ChannelCredentials:
        """Credentials of a client that trusts this authority."""
        if own is None:
            return grpc.ssl_channel_credentials(self.pem)
        return grpc.ssl_channel_credentials(self.pem, own.key, own.cert)


def raw_names(der: bytes) -> x509.UnrecognizedExtension:
    """Subject alternative names as they stand in the certificate, whether anybody can parse them or not."""
    return x509.UnrecognizedExtension(ExtensionOID.SUBJECT_ALTERNATIVE_NAME, der)


# One DNS name whose byte is not ASCII: OpenSSL and gRPC take it, and others cannot parse it.
UNREADABLE_NAME = raw_names(b"\x30\x03\x82\x01\xff")


def write(path: Path, content: bytes) -> Path:
    """Replace a file as a careful operator does: nobody sees a part of it. Its time is never that of the old one."""
    beside = path.with_suffix(".new")
    beside.write_bytes(content)
    beside.chmod(0o600)
    beside.replace(path)
    return path


def overwrite(path: Path, content: bytes) -> None:
    """Write into a file in place, as a careless one does, and let its time differ from before."""
    time_ns = path.stat().st_mtime_ns + 1_000_000
    path.write_bytes(content)
    os.utime(path, ns=(time_ns, time_ns))


def _name(text: str) -> x509.GeneralName:
    if "://" in text:
        return x509.UniformResourceIdentifier(text)
    try:
        return x509.IPAddress(ipaddress.ip_address(text))
    except ValueError:
        return x509.DNSName(text)
