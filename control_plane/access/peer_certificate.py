"""The certificate of whoever is at the other end of a connection, which TLS has verified."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache

from cryptography import x509
from cryptography.hazmat.primitives.serialization import Encoding

from control_plane.access.identity_names import address_identity, dns_identity, uri_identity
from control_plane.errors import Unauthenticated

_CERTIFICATE_KEY = "x509_pem_cert"  # of gRPC's auth context
_TEXT_TYPES = (x509.DNSName, x509.UniformResourceIdentifier, x509.RFC822Name)
MAX_CACHED = 4096
MAX_HOLDER_CHARS = 255


@dataclass(frozen=True, slots=True)
class PeerCertificate:
    """What a verified certificate says of its owner. Names that are not identities are left out."""

    dns_names: tuple[str, ...]  # lower-case
    uris: tuple[str, ...]
    addresses: tuple[str, ...]
    fingerprint: str  # SHA-256 of the DER form, hexadecimal
    not_after_s: float  # wall clock

    @property
    def identities(self) -> tuple[str, ...]:
        """What it stands for: whatever authenticates its owner, and whatever a deny list can name."""
        return self.uris + self.dns_names + self.addresses

    @property
    def holder(self) -> str:
        """Its owner as a principal's name: "cert:" and its one identity, or its fingerprint if there is not one."""
        names = self.identities
        is_short = len(names) == 1 and len(names[0]) <= MAX_HOLDER_CHARS
        return f"cert:{names[0]}" if is_short else f"cert:sha256:{self.fingerprint}"

    def __str__(self) -> str:
        return ", ".join(self.identities) or f"sha256:{self.fingerprint}"


def certificate_of(auth_context: Mapping[str, Iterable[bytes]] | None) -> PeerCertificate | None:
    """The certificate of a call's connection, from gRPC's auth context. None without one.

    gRPC keeps one only if the handshake verified it. Raises Unauthenticated if it cannot be read.
    """
    pem = next(iter((auth_context or {}).get(_CERTIFICATE_KEY) or ()), None)
    if pem is None:
        return None
    try:
        return read_certificate(pem)
    except ValueError as error:
        raise Unauthenticated(f"the certificate of this connection {error}; connect with another one") from error


@lru_cache(MAX_CACHED)
def read_certificate(pem: bytes) -> PeerCertificate:
    """One certificate in PEM. Raises ValueError, which says what is wrong with it."""
    try:
        certificate = x509.load_pem_x509_certificate(pem)
        names = _names_of(certificate)
    except (
        ValueError,
        TypeError,
        x509.DuplicateExtension,
        x509.InvalidVersion,
        x509.UnsupportedGeneralNameType,
    ) as error:
        raise ValueError("cannot be parsed: it, or its extensions, are not valid X.509") from error
    texts = {type_: names.get_values_for_type(type_) for type_ in _TEXT_TYPES}
    if not all(text.isprintable() for values in texts.values() for text in values):
        raise ValueError("has a subject alternative name with a control character")
    return PeerCertificate(
        dns_names=_identities(dns_identity, texts[x509.DNSName]),
        uris=_identities(uri_identity, texts[x509.UniformResourceIdentifier]),
        addresses=_identities(address_identity, map(str, names.get_values_for_type(x509.IPAddress))),
        fingerprint=hashlib.sha256(certificate.public_bytes(Encoding.DER)).hexdigest(),
        not_after_s=certificate.not_valid_after_utc.timestamp(),
    )


def _names_of(certificate: x509.Certificate) -> x509.SubjectAlternativeName:
    try:
        return certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except x509.ExtensionNotFound:
        return x509.SubjectAlternativeName([])


def _identities(form: Callable[[str], str | None], names: Iterable[str]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(filter(None, map(form, names))))
