"""What was found out about the signature of an adapter's files. It is stored with the version."""

from __future__ import annotations

import enum
from dataclasses import dataclass, replace


class SignatureMethod(enum.Enum):
    """What the signer's identity rests on."""

    KEY = "key"  # a public key that the operator trusts
    CERTIFICATE = "certificate"  # a certificate below one that the operator trusts


@dataclass(frozen=True, slots=True)
class SignatureVerdict:
    """A signature that was valid when its files were registered."""

    signer: str  # as the operator names the trusted key or certificate
    method: SignatureMethod
    key_fingerprint: str  # SHA-256 of the signing key's SubjectPublicKeyInfo, 64 hexadecimal digits
    verify_time_s: float  # wall clock, seconds since 1970
    subject: str = ""  # of the signing certificate, as in RFC 4514; empty for a key

    def is_alike(self, other: SignatureVerdict) -> bool:
        """Whether both say the same, at whatever time."""
        return replace(self, verify_time_s=other.verify_time_s) == other
