"""Makes signed tokens and key sets for tests, without the code that is tested."""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
from functools import cache
from typing import Any

from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, padding, rsa
from cryptography.hazmat.primitives.asymmetric.utils import decode_dss_signature

ISSUER, AUDIENCE = "https://id.example", "motet"
NOW_S = 1_800_000_000
CLAIMS = {
    "iss": ISSUER,
    "aud": AUDIENCE,
    "sub": "alice",
    "exp": NOW_S + 600,
    "tenant": "acme",
    "roles": ["infer", "openid"],
}


def encoded(data: bytes | str) -> str:
    """Base64url without padding."""
    return base64.urlsafe_b64encode(data.encode() if isinstance(data, str) else data).rstrip(b"=").decode()


@cache
def private_key(kind: str, number: int = 0) -> Any:
    """A key of a kind: an algorithm's name, or RS256 with a number of bits as "rsa1024". The same for one number."""
    if kind == "EdDSA":
        return ed25519.Ed25519PrivateKey.from_private_bytes(bytes([number + 1]) * 32)
    if kind == "ES256":
        return ec.derive_private_key(number + 5, ec.SECP256R1())
    bits = 2048 if kind == "RS256" else int(kind.removeprefix("rsa"))
    return rsa.generate_private_key(65537, bits)


def public_pem(key: Any) -> bytes:
    pem: bytes = key.public_key().public_bytes(
        serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
    )
    return pem


def jwk(key: Any, kid: str | None = None, **more: Any) -> dict[str, Any]:
    """The public key as a member of a key set."""
    numbers: Any
    if isinstance(key, ed25519.Ed25519PrivateKey):
        raw = key.public_key().public_bytes(serialization.Encoding.Raw, serialization.PublicFormat.Raw)
        entry = {"kty": "OKP", "crv": "Ed25519", "x": encoded(raw)}
    elif isinstance(key, ec.EllipticCurvePrivateKey):
        numbers = key.public_key().public_numbers()
        entry = {"kty": "EC", "crv": "P-256"}
        entry |= {name: encoded(getattr(numbers, name).to_bytes(32, "big")) for name in "xy"}
    else:
        numbers = key.public_key().public_numbers()
        entry = {"kty": "RSA", "e": "AQAB", "n": encoded(numbers.n.to_bytes((numbers.n.bit_length() + 7) // 8, "big"))}
    return {**entry, **({} if kid is None else {"kid": kid}), **more}


def jwks(*entries: dict[str, Any]) -> bytes:
    return json.dumps({"keys": entries}).encode()


def signature(key: Any, algorithm: str, data: bytes) -> bytes:
    """What `algorithm` makes of the data. For HS256, `key` is bytes."""
    if algorithm == "none":
        return b""
    if algorithm == "HS256":
        return hmac.digest(key, data, hashlib.sha256)
    if algorithm == "EdDSA":
        return bytes(key.sign(data))
    if algorithm == "ES256":
        r, s = decode_dss_signature(key.sign(data, ec.ECDSA(hashes.SHA256())))
        return r.to_bytes(32, "big") + s.to_bytes(32, "big")
    return bytes(key.sign(data, padding.PKCS1v15(), hashes.SHA256()))


def raw_token(header: str, claims: str, key: Any, algorithm: str) -> str:
    """A token of any text as header and claims, whatever they say."""
    signed = f"{encoded(header)}.{encoded(claims)}"
    return f"{signed}.{encoded(signature(key, algorithm, signed.encode()))}"


def token(
    key: Any,
    algorithm: str = "EdDSA",
    *,
    header: dict[str, Any] | None = None,
    without: tuple[str, ...] = (),
    **claims: Any,
) -> str:
    """A token of CLAIMS with changes, signed."""
    whole = {name: value for name, value in {**CLAIMS, **claims}.items() if name not in without}
    return raw_token(json.dumps({"alg": algorithm, **(header or {})}), json.dumps(whole), key, algorithm)
