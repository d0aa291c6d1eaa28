"""Makes signatures of adapters in the tests themselves, right and wrong in every part."""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat, load_pem_private_key

from control_plane.signatures.signers import Signers, read_signers
from tests.fakes.authority import Issued

BUNDLES = Path(__file__).parent / "bundles"
FILES = {
    name: (BUNDLES / "adapter" / name).read_bytes() for name in ("adapter_config.json", "adapter_model.safetensors")
}
Change = Callable[[dict[str, Any]], None]
_PAYLOAD_TYPE = "application/vnd.in-toto+json"


def pem_of(key: ec.EllipticCurvePrivateKey) -> str:
    return key.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo).decode()


def signers(**by_tenant: Sequence[tuple[str, str]]) -> Signers:
    """From (name, PEM) by tenant; `everybody` stands for "*"."""
    document = {
        "*" if tenant == "everybody" else tenant: [{"name": name, "pem": pem} for name, pem in listed]
        for tenant, listed in by_tenant.items()
    }
    return read_signers(json.dumps(document).encode())


def statement(files: Mapping[str, bytes]) -> dict[str, Any]:
    """What is signed for these files."""
    digests = {name: hashlib.sha256(data).hexdigest() for name, data in sorted(files.items())}
    root = hashlib.sha256(b"".join(map(bytes.fromhex, digests.values()))).hexdigest()
    return {
        "_type": "https://in-toto.io/Statement/v1",
        "subject": [{"name": "adapter", "digest": {"sha256": root}}],
        "predicateType": "https://model_signing/signature/v1.0",
        "predicate": {
            "serialization": {"method": "files", "hash_type": "sha256", "allow_symlinks": False},
            "resources": [{"name": name, "algorithm": "sha256", "digest": digest} for name, digest in digests.items()],
        },
    }


@dataclass
class Maker:
    """Signs with one key. The changes are made before and after signing."""

    key: ec.EllipticCurvePrivateKey = field(default_factory=lambda: ec.generate_private_key(ec.SECP256R1()))
    certificates: Sequence[bytes] = ()  # PEM, the signing one first; empty: signed by the key alone

    @classmethod
    def of(cls, issued: Issued, *others: bytes) -> Maker:
        key = load_pem_private_key(issued.key, None)
        assert isinstance(key, ec.EllipticCurvePrivateKey)
        return cls(key, (issued.cert, *others))

    @property
    def pem(self) -> str:
        return pem_of(self.key)

    def sign(
        self,
        files: Mapping[str, bytes] = FILES,
        *,
        before: Change = lambda _: None,
        after: Change = lambda _: None,
        payload: bytes | None = None,
    ) -> bytes:
        """model.sig for these files; `before` changes the statement, `after` the bundle."""
        stated = statement(files)
        before(stated)
        payload = json.dumps(stated, indent=2).encode() if payload is None else payload
        encoded = b"DSSEv1 %d %s %d %s" % (len(_PAYLOAD_TYPE), _PAYLOAD_TYPE.encode(), len(payload), payload)
        hash_by_bits = {256: hashes.SHA256(), 384: hashes.SHA384(), 521: hashes.SHA512()}
        signature = self.key.sign(encoded, ec.ECDSA(hash_by_bits[self.key.curve.key_size]))
        bundle = {
            "mediaType": "application/vnd.dev.sigstore.bundle.v0.3+json",
            "verificationMaterial": {**self._material(), "tlogEntries": []},
            "dsseEnvelope": {
                "payload": base64.b64encode(payload).decode(),
                "payloadType": _PAYLOAD_TYPE,
                "signatures": [{"sig": base64.b64encode(signature).decode(), "keyid": ""}],
            },
        }
        after(bundle)
        return json.dumps(bundle).encode()

    def _material(self) -> dict[str, Any]:
        if not self.certificates:
            return {"publicKey": {"hint": hashlib.sha256(self.pem.encode()).hexdigest()}}
        ders = [x509.load_pem_x509_certificate(pem).public_bytes(Encoding.DER) for pem in self.certificates]
        return {
            "x509CertificateChain": {"certificates": [{"rawBytes": base64.b64encode(der).decode()} for der in ders]}
        }


def write(directory: Path, signature: bytes | None, files: Mapping[str, bytes] = FILES) -> dict[str, Path]:
    """The files of an upload, by name."""
    content = dict(files) if signature is None else {**files, "model.sig": signature}
    paths = {}
    for name, data in content.items():
        paths[name] = directory / name
        paths[name].write_bytes(data)
    return paths
