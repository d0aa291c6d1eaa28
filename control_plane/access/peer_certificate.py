"""The certificate of whoever is at the other end of a connection, which TLS has verified."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache

from cryptography import x509
from cryptography.hazmat.primitives.serialization import Encoding

_CERTIFICATE_KEY = "x509_pem_cert"  # of gRPC's auth context
MAX_CACHED = 4096


@dataclass(frozen=True, slots=True)
class PeerCertificate:
    """What a verified certificate says of its owner."""

    dns_names: tuple[str, ...]  # lower-case
    uris: tuple[str, ...]
    fingerprint: str  # SHA-256 of the DER form, hexadecimal
    not_after_s: float  # wall clock

    @property
    def identities(self) -> tuple[str, ...]:
        """Its subject alternative names: URIs first, then DNS names."""
        return self.uris + self.dns_names

    def __str__(self) -> str:
        return ", ".join(self.identities) or f"sha256:{self.fingerprint}"


def certificate_of(auth_context: Mapping[str, Iterable[bytes]] | None) -> PeerCertificate | None:
    """The certificate of a call's connection, from gRPC's auth context. None without one.

    gRPC keeps one only if the handshake verified it.
    """
    pem = next(iter((auth_context or {}).get(_CERTIFICATE_KEY) or ()), None)
    return None if pem is None else read_certificate(pem)


@lru_cache(MAX_CACHED)
def read_certificate(pem: bytes) -> PeerCertificate:
    """One certificate in PEM. Raises ValueError."""
    certificate = x509.load_pem_x509_certificate(pem)
    try:
        names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except x509.ExtensionNotFound:
        names = x509.SubjectAlternativeName([])
    return PeerCertificate(
        dns_names=tuple(name.lower() for name in names.get_values_for_type(x509.DNSName)),
        uris=tuple(names.get_values_for_type(x509.UniformResourceIdentifier)),
        fingerprint=hashlib.sha256(certificate.public_bytes(Encoding.DER)).hexdigest(),
        not_after_s=certificate.not_valid_after_utc.timestamp(),
    )
