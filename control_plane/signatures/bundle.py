"""Reads an OpenSSF model signature: a Sigstore bundle in JSON around a DSSE envelope around an in-toto statement.

The format is that of model_signing 1.x (predicate type https://model_signing/signature/v1.0). Everything is read
strictly: what a verifier and a signer could understand differently is refused. Nothing here decides whom to trust.
Standard library only.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from contract.ids import is_digest
from control_plane.errors import SignatureInvalid

MAX_SIGNATURE_BYTES = 256 << 10  # of model.sig
MAX_CERTIFICATES = 8
MEDIA_TYPE = "application/vnd.dev.sigstore.bundle.v0.3+json"
PAYLOAD_TYPE = "application/vnd.in-toto+json"
STATEMENT_TYPE = "https://in-toto.io/Statement/v1"
PREDICATE_TYPE = "https://model_signing/signature/v1.0"


@dataclass(frozen=True, slots=True)
class Bundle:
    """The parts of a signature, none of them verified."""

    payload: bytes  # the statement, as it was signed
    signature: bytes
    key_hint: str  # which key signed it; empty: not named
    certificates: tuple[bytes, ...]  # DER, the signing one first; empty for a signature by a key

    @property
    def signed_bytes(self) -> bytes:
        """What the signature is over: the pre-authentication encoding of DSSE."""
        return b"DSSEv1 %d %s %d %s" % (len(PAYLOAD_TYPE), PAYLOAD_TYPE.encode(), len(self.payload), self.payload)


def read_bundle(data: bytes) -> Bundle:
    """The parts of model.sig. Raises SignatureInvalid."""
    if len(data) > MAX_SIGNATURE_BYTES:
        raise SignatureInvalid(f"model.sig has {len(data)} bytes; at most {MAX_SIGNATURE_BYTES} are read")
    document = _json(data, "model.sig")
    _expect(document.get("mediaType"), MEDIA_TYPE, "mediaType")
    envelope = _member(document, "dsseEnvelope", dict)
    _expect(envelope.get("payloadType"), PAYLOAD_TYPE, "dsseEnvelope.payloadType")
    signatures = _member(envelope, "signatures", list)
    if len(signatures) != 1 or not isinstance(signatures[0], dict):
        raise SignatureInvalid(f"model.sig: dsseEnvelope.signatures has {len(signatures)} entries; there must be one")
    material = _member(document, "verificationMaterial", dict)
    kinds = material.keys() & {"publicKey", "x509CertificateChain", "certificate"}
    hint: Any = ""
    certificates: tuple[bytes, ...] = ()
    if kinds == {"publicKey"}:
        hint = _member(material, "publicKey", dict).get("hint") or ""
    elif kinds == {"x509CertificateChain"}:
        certificates = _certificates(_member(material, "x509CertificateChain", dict))
    else:
        raise SignatureInvalid(
            f"model.sig: verificationMaterial has {', '.join(sorted(kinds)) or 'neither a key nor certificates'}; sign "
            "with `model_signing sign key` or `model_signing sign certificate`"
        )
    if not isinstance(hint, str):
        raise SignatureInvalid("model.sig: verificationMaterial.publicKey.hint is not a string")
    payload = _base64(envelope.get("payload"), "dsseEnvelope.payload")
    return Bundle(payload, _base64(signatures[0].get("sig"), "dsseEnvelope.signatures[0].sig"), hint, certificates)


def read_statement(payload: bytes) -> dict[str, str]:
    """SHA-256 of every signed file by its name. Call with the payload of a signature that is valid.

    Raises SignatureInvalid.
    """
    statement = _json(payload, "the statement")
    _expect(statement.get("_type"), STATEMENT_TYPE, "_type")
    _expect(statement.get("predicateType"), PREDICATE_TYPE, "predicateType")
    subjects = _member(statement, "subject", list)
    if len(subjects) != 1 or not isinstance(subjects[0], dict):
        raise SignatureInvalid(f"model.sig: the statement has {len(subjects)} subjects; there must be one")
    predicate = _member(statement, "predicate", dict)
    serialization = _member(predicate, "serialization", dict)
    _expect(serialization.get("method"), "files", "predicate.serialization.method")
    _expect(serialization.get("hash_type"), "sha256", "predicate.serialization.hash_type")
    digests, root = {}, hashlib.sha256()
    for resource in _member(predicate, "resources", list):
        name, digest = _resource(resource)
        if name in digests:
            raise SignatureInvalid("model.sig: the statement names a file twice")
        digests[name] = digest
        root.update(bytes.fromhex(digest))
    if _member(subjects[0], "digest", dict).get("sha256") != root.hexdigest():
        raise SignatureInvalid("model.sig: the statement's root digest is not that of the files that it lists")
    return digests


def check_files(signed: Mapping[str, str], found: Mapping[str, str], demanded: Collection[str] = ()) -> None:
    """Raise SignatureInvalid unless every file found was signed with these bytes. Both are SHA-256 by name.

    `demanded`: names of files that must be found where they were signed.
    """
    for name in demanded:
        if name in signed and name not in found:
            raise SignatureInvalid(
                f"{name} is among the files that model.sig signs, and is missing; register the whole directory, or "
                "sign one without it"
            )
    for name, digest in found.items():
        if name not in signed:
            raise SignatureInvalid(f"{name} is not among the files that model.sig signs; sign the directory again")
        if signed[name] != digest:
            raise SignatureInvalid(
                f"{name} is not the file that model.sig signs: its sha256 is {digest}, signed is {signed[name]}; sign "
                "the directory again, or register the files that were signed"
            )


def _resource(resource: object) -> tuple[str, str]:
    if not isinstance(resource, dict):
        raise SignatureInvalid("model.sig: predicate.resources has an entry that is not an object")
    name, digest = resource.get("name"), resource.get("digest")
    _expect(resource.get("algorithm"), "sha256", "predicate.resources.algorithm")
    if not isinstance(name, str) or not isinstance(digest, str) or not is_digest(digest):
        raise SignatureInvalid("model.sig: predicate.resources has an entry without a name or without a sha256")
    return name, digest


def _certificates(chain: Mapping[str, Any]) -> tuple[bytes, ...]:
    listed: Sequence[Any] = _member(chain, "certificates", list)
    if not 0 < len(listed) <= MAX_CERTIFICATES:
        raise SignatureInvalid(f"model.sig has {len(listed)} certificates; there must be 1 to {MAX_CERTIFICATES}")
    where = "verificationMaterial.x509CertificateChain.certificates.rawBytes"
    return tuple(_base64(item.get("rawBytes") if isinstance(item, dict) else None, where) for item in listed)


def _json(data: bytes, what: str) -> dict[str, Any]:
    try:
        document = json.loads(data, object_pairs_hook=_without_repetition)
    except RecursionError:
        raise SignatureInvalid(f"{what} is nested too deeply") from None
    except ValueError as error:
        raise SignatureInvalid(f"{what} is not valid JSON: {str(error)[:100]}") from None
    if not isinstance(document, dict):
        raise SignatureInvalid(f"{what} is not a JSON object")
    return document


def _without_repetition(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Of a member that appears twice one reader takes the first, and another the last."""
    document = dict(pairs)
    if len(document) != len(pairs):
        raise ValueError("a member appears twice")
    return document


def _member(document: Mapping[str, Any], name: str, kind: type[Any]) -> Any:
    value = document.get(name)
    if not isinstance(value, kind):
        raise SignatureInvalid(f"model.sig: {name} is missing or is not of type {kind.__name__}")
    return value


def _expect(found: object, expected: str, where: str) -> None:
    if found != expected:
        shown = repr(found)[:100] if isinstance(found, str) else "missing or not a string"
        raise SignatureInvalid(f"model.sig: {where} is {shown}; it must be {expected!r}")


def _base64(text: object, where: str) -> bytes:
    try:
        if not isinstance(text, str):
            raise ValueError("not a string")
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        raise SignatureInvalid(f"model.sig: {where} is missing or is not base64") from None
