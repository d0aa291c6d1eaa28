"""Whose signatures count: public keys and certificates that the operator trusts, by tenant.

The file is JSON: {"TENANT": [{"name": ..., "pem": ...}]}, with "*" for every tenant. Only this file needs the package
cryptography, and only where signers are configured.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from control_plane.access.principal import ANY_TENANT
from control_plane.access.tenant_names import TENANT_FORM, is_tenant
from control_plane.errors import SignatureInvalid
from control_plane.signatures.bundle import MAX_CERTIFICATES, Bundle
from control_plane.signatures.verdict import SignatureMethod, SignatureVerdict

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePublicKey
    from cryptography.x509 import Certificate

MAX_NAME_CHARS = 128
_MAX_SUBJECT_CHARS = 256
_CURVES = ("secp256r1", "secp384r1", "secp521r1")
_SIGN_AGAIN = "sign with a key on the curve P-256, P-384 or P-521"


@dataclass(frozen=True, slots=True)
class TrustedKey:
    """One public key."""

    name: str
    key: EllipticCurvePublicKey
    hint: str  # how model_signing names the key: SHA-256 of its PEM


@dataclass(frozen=True, slots=True)
class TrustedRoot:
    """Certificates that sign those of signers."""

    name: str
    certificates: tuple[Certificate, ...]


Signer = TrustedKey | TrustedRoot


class Signers:
    """The signers that are trusted, by tenant."""

    def __init__(self, by_tenant: Mapping[str, tuple[Signer, ...]]) -> None:
        self._by_tenant = dict(by_tenant)

    def of(self, tenant: str) -> tuple[Signer, ...]:
        """The signers that the tenant trusts, then those that every tenant trusts."""
        own = self._by_tenant.get(tenant, ()) if tenant != ANY_TENANT else ()
        return (*own, *self._by_tenant.get(ANY_TENANT, ()))

    def identify(self, bundle: Bundle, tenant: str, now_s: float) -> SignatureVerdict:
        """Whose signature it is, for one of the tenant's signers. Raises SignatureInvalid."""
        if bundle.certificates:
            roots = [signer for signer in self.of(tenant) if isinstance(signer, TrustedRoot)]
            return _by_certificate(bundle, roots, now_s)
        keys = [signer for signer in self.of(tenant) if isinstance(signer, TrustedKey)]
        return _by_key(bundle, keys, now_s)


def read_signers(content: bytes) -> Signers:
    """Read the file. Raises ValueError with what is wrong."""
    try:
        document = json.loads(content, object_pairs_hook=_without_twins)
    except _MemberTwice as error:
        raise ValueError(f"{error.args[0][:64]!r} appears twice in one object; put both lists into one") from None
    except (ValueError, RecursionError):
        raise ValueError("it is not valid JSON") from None
    if not isinstance(document, dict):
        raise ValueError('it is not a JSON object; write {"*": [{"name": ..., "pem": ...}]}')
    by_tenant = {}
    for tenant, listed in document.items():
        if tenant != ANY_TENANT and not is_tenant(tenant):
            raise ValueError(f"{tenant[:64]!r} is neither '*' nor a tenant: {TENANT_FORM}")
        if not isinstance(listed, list):
            raise ValueError(f"{tenant}: is not a list of signers")
        by_tenant[tenant] = tuple(_signer(item, f"{tenant}[{place}]") for place, item in enumerate(listed))
    return Signers(by_tenant)


class _MemberTwice(Exception):
    """Of two members of one name the reader of a file sees both, and a program takes one."""


def _without_twins(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    members: dict[str, Any] = {}
    for name, value in pairs:
        if name in members:
            raise _MemberTwice(name)
        members[name] = value
    return members


def _signer(item: Any, where: str) -> Signer:
    is_object = isinstance(item, dict) and item.keys() == {"name", "pem"}
    if not is_object or not all(isinstance(value, str) for value in item.values()):
        raise ValueError(f'{where}: must have "name" and "pem", both strings, and nothing else')
    name, pem = item["name"], item["pem"].encode()
    if not 0 < len(name) <= MAX_NAME_CHARS or not name.isprintable():
        raise ValueError(f"{where}: name must have 1 to {MAX_NAME_CHARS} printable characters")
    from cryptography import x509
    from cryptography.exceptions import UnsupportedAlgorithm
    from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePublicKey
    from cryptography.hazmat.primitives.serialization import load_pem_public_key

    try:
        if b"CERTIFICATE" in pem:
            return TrustedRoot(name, tuple(x509.load_pem_x509_certificates(pem)))
        key = load_pem_public_key(pem)
    except (ValueError, x509.InvalidVersion, UnsupportedAlgorithm):
        raise ValueError(f"{where} ({name}): pem is neither a public key nor a certificate") from None
    if not isinstance(key, EllipticCurvePublicKey) or key.curve.name not in _CURVES:
        raise ValueError(f"{where} ({name}): the key is not on the curve P-256, P-384 or P-521")
    return TrustedKey(name, key, hashlib.sha256(_pem_of(key)).hexdigest())


def _by_key(bundle: Bundle, keys: list[TrustedKey], now_s: float) -> SignatureVerdict:
    for trusted in keys:
        # The hint says which key to try, and is not signed.
        if bundle.key_hint in ("", trusted.hint) and _is_signed(bundle, trusted.key):
            return SignatureVerdict(trusted.name, SignatureMethod.KEY, _fingerprint(trusted.key), now_s)
    named = any(bundle.key_hint == trusted.hint for trusted in keys)
    if named:
        raise SignatureInvalid("model.sig: the signature is not that of its payload; sign the directory again")
    raise SignatureInvalid(
        "model.sig is signed by a key that is not trusted here; sign with a key of the server's --trusted-signers, "
        "or let the operator add this one"
    )


def _by_certificate(bundle: Bundle, roots: list[TrustedRoot], now_s: float) -> SignatureVerdict:
    from cryptography import x509
    from cryptography.exceptions import UnsupportedAlgorithm
    from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePublicKey

    try:
        signing, *others = [x509.load_der_x509_certificate(raw) for raw in bundle.certificates]
        key = signing.public_key()
    except (ValueError, x509.InvalidVersion, UnsupportedAlgorithm):
        raise SignatureInvalid("model.sig has a certificate that cannot be read") from None
    if not isinstance(key, EllipticCurvePublicKey) or key.curve.name not in _CURVES:
        raise SignatureInvalid(f"model.sig: the certificate's key has another form; {_SIGN_AGAIN}")
    reason = "no certificate is trusted here; ask the operator for --trusted-signers"
    for root in roots:
        found = _why_not_below(signing, others, root, now_s)
        if found is None:
            _require_for_signing(signing)
            if not _is_signed(bundle, key):
                raise SignatureInvalid("model.sig: the signature is not that of its payload; sign the directory again")
            subject = signing.subject.rfc4514_string()[:_MAX_SUBJECT_CHARS]
            return SignatureVerdict(root.name, SignatureMethod.CERTIFICATE, _fingerprint(key), now_s, subject)
        reason = found
    raise SignatureInvalid(f"model.sig: its certificate is not trusted: {reason}")


def _why_not_below(signing: Certificate, others: list[Certificate], root: TrustedRoot, now_s: float) -> str | None:
    """Why there is no valid chain from a certificate to a trusted one; None if there is."""
    from cryptography import x509
    from cryptography.x509 import verification

    def is_authority(_policy: verification.Policy, _cert: x509.Certificate, value: x509.BasicConstraints) -> None:
        if not value.ca:
            raise ValueError("an issuer is not an authority")

    def signs_certificates(_policy: verification.Policy, _cert: x509.Certificate, value: x509.KeyUsage | None) -> None:
        if value is not None and not value.key_cert_sign:
            raise ValueError("an issuer may not sign certificates")

    # Rules for names of web servers are left out: a signer has none.
    agnostic = verification.Criticality.AGNOSTIC
    authorities = (
        verification.ExtensionPolicy.permit_all()
        .require_present(x509.BasicConstraints, agnostic, is_authority)
        .may_be_present(x509.KeyUsage, agnostic, signs_certificates)
    )
    verifier = (
        verification.PolicyBuilder()
        .store(verification.Store(list(root.certificates)))
        .time(datetime.fromtimestamp(now_s, UTC))
        .max_chain_depth(MAX_CERTIFICATES)
        .extension_policies(ee_policy=verification.ExtensionPolicy.permit_all(), ca_policy=authorities)
        .build_client_verifier()
    )
    try:
        verifier.verify(signing, others)
    except (verification.VerificationError, ValueError) as error:
        return str(error)[:200]
    return None


def _require_for_signing(certificate: Certificate) -> None:
    """Raise SignatureInvalid unless the certificate says that its key signs documents or code."""
    from cryptography import x509

    extensions = certificate.extensions
    try:
        if extensions.get_extension_for_class(x509.KeyUsage).value.digital_signature:
            return
    except x509.ExtensionNotFound:
        pass
    try:
        usage = extensions.get_extension_for_class(x509.ExtendedKeyUsage).value
        if x509.oid.ExtendedKeyUsageOID.CODE_SIGNING in usage:
            return
    except x509.ExtensionNotFound:
        pass
    raise SignatureInvalid(
        "model.sig: its certificate is not made for signing; it needs the key usage digitalSignature, or codeSigning"
    )


def _is_signed(bundle: Bundle, key: EllipticCurvePublicKey) -> bool:
    from cryptography.exceptions import InvalidSignature
    from cryptography.hazmat.primitives import hashes
    from cryptography.hazmat.primitives.asymmetric.ec import ECDSA

    hash_by_bits = {256: hashes.SHA256(), 384: hashes.SHA384(), 521: hashes.SHA512()}
    try:
        key.verify(bundle.signature, bundle.signed_bytes, ECDSA(hash_by_bits[key.curve.key_size]))
    except InvalidSignature:
        return False
    return True


def _pem_of(key: EllipticCurvePublicKey) -> bytes:
    from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

    return key.public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)


def _fingerprint(key: EllipticCurvePublicKey) -> str:
    from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

    return hashlib.sha256(key.public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)).hexdigest()
