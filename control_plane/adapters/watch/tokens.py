"""Tokens that continue a watch: sealed, because the numbers in them count the changes of all tenants."""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets

_NONCE_BYTES = 8
_MAC_BYTES = 8
_NUMBER_BYTES = 8
_FORM = re.compile(r"[0-9a-f]{48}")


class ResumeTokens:
    """Seals sequence numbers with a key of this process: after a restart no earlier token can be opened."""

    def __init__(self) -> None:
        self._key = secrets.token_bytes(32)

    def seal(self, sequence: int) -> str:
        """A token for this number, another one each time."""
        nonce = secrets.token_bytes(_NONCE_BYTES)
        number = (sequence ^ self._mask(nonce)).to_bytes(_NUMBER_BYTES, "big")
        return (nonce + number + self._mac(nonce + number)).hex()

    def open(self, token: str) -> int | None:
        """The number of a token; None if this process did not seal it."""
        raw = bytes.fromhex(token)
        sealed, mac = raw[:-_MAC_BYTES], raw[-_MAC_BYTES:]
        if not hmac.compare_digest(mac, self._mac(sealed)):
            return None
        return int.from_bytes(sealed[_NONCE_BYTES:], "big") ^ self._mask(sealed[:_NONCE_BYTES])

    def _mask(self, nonce: bytes) -> int:
        return int.from_bytes(hashlib.blake2b(nonce, key=self._key, digest_size=_NUMBER_BYTES).digest(), "big")

    def _mac(self, sealed: bytes) -> bytes:
        return hashlib.blake2b(sealed, key=self._key, digest_size=_MAC_BYTES, person=b"token").digest()


def is_token(text: str) -> bool:
    """Whether `text` has the form of a token."""
    return _FORM.fullmatch(text) is not None
