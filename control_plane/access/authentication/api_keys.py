"""API keys: finds the principal of a key by the file of keys, which is read again when it changes."""

from __future__ import annotations

import hashlib
import hmac
from pathlib import Path

from control_plane.access.authentication.key_file import PREFIX, KeyEntry, parse_keys
from control_plane.access.authenticator import Presented
from control_plane.access.principal import Principal
from control_plane.access.watched_files import WatchedFiles
from control_plane.errors import Unauthenticated

_Known = tuple[str, Principal]  # SHA-256 of the key, and who presents it
# Takes the place of a key that is not in the file, so that both cases do the same work. No text has this SHA-256.
_NOBODY: _Known = ("-" * 64, Principal())


class ApiKeys:
    """A method of authentication: bearer tokens of the form "motet_ID_SECRET"."""

    def __init__(self, path: Path) -> None:
        """Reads the file. Raises OSError or ValueError."""
        self.files: WatchedFiles[dict[str, _Known]] = WatchedFiles([path], _read, what="API keys")

    @property
    def num_keys(self) -> int:
        """How many keys the file has, expired ones included."""
        return len(self.files.value)

    def principal(self, presented: Presented) -> Principal | None:
        """The principal of the key; None for a token of another form. Raises Unauthenticated."""
        token = presented.token
        if not token.startswith(PREFIX):
            return None
        key_id = token[len(PREFIX) :].partition("_")[0]
        digest = hashlib.sha256(token.encode("utf-8", "surrogatepass")).hexdigest()
        sha256, principal = self.files.value.get(key_id, _NOBODY)
        if not hmac.compare_digest(digest, sha256):
            raise Unauthenticated("the API key is not valid; ask the operator of the server for a new one")
        return principal


def _read(content: bytes) -> dict[str, _Known]:
    return {entry.id: (entry.sha256, _principal(entry)) for entry in parse_keys(content)}


def _principal(entry: KeyEntry) -> Principal:
    return entry.grant.principal(f"key:{entry.id}", expires_s=entry.expires_s)
