"""Client certificates: finds the principal by the names in a certificate that TLS has verified already.

The file maps subject alternative names to what they allow. It is read again when it changes.
"""

from __future__ import annotations

from pathlib import Path

from control_plane.access.authentication.grants import (
    InvalidAccessFile,
    check_fields,
    read_grant,
    read_object,
    shortened,
)
from control_plane.access.authenticator import Presented
from control_plane.access.identity_names import IDENTITY_FORM, identity
from control_plane.access.principal import Principal
from control_plane.access.watched_files import WatchedFiles
from control_plane.errors import Unauthenticated

MAX_IDENTITIES = 10_000
MAX_IDENTITY_CHARS = 255


class ClientIdentities:
    """A method of authentication: certificates whose subject alternative name the operator lists."""

    def __init__(self, path: Path) -> None:
        """Reads the file. Raises OSError or ValueError."""
        self.files: WatchedFiles[dict[str, Principal]] = WatchedFiles(
            [path], parse_identities, what="client identities"
        )

    @property
    def num_identities(self) -> int:
        """How many names the file has."""
        return len(self.files.value)

    def principal(self, presented: Presented) -> Principal | None:
        """The principal of the certificate; None without one, or where a token is presented beside it.

        Raises Unauthenticated if none of the certificate's names is listed, or several are.
        """
        # A token that no method knows is refused: the caller meant it, and the certificate may allow other things.
        if presented.token or not (presented.identities or presented.holder):
            return None
        listed = self.files.value
        found = [name for name in dict.fromkeys(presented.identities) if name in listed]
        if not found:
            raise Unauthenticated(
                "none of the names in the client's certificate is known to this server; ask its operator to list one"
            ).of(Principal(presented.holder))
        if len(found) > 1:
            raise Unauthenticated(
                f"{len(found)} names in the client's certificate are known to this server, and one is expected; use a "
                "certificate with one of them"
            ).of(Principal(presented.holder))
        return listed[found[0]]


def parse_identities(content: bytes) -> dict[str, Principal]:
    """The principals in a file, by the name in the certificate. Raises InvalidAccessFile."""
    document = read_object(content)
    if len(document) > MAX_IDENTITIES:
        raise InvalidAccessFile(f"has {len(document)} names; at most {MAX_IDENTITIES} are allowed")
    listed: dict[str, Principal] = {}
    for text, entry in document.items():
        name = _identity(text)
        if name in listed:
            raise InvalidAccessFile(f"{shortened(text)}: is listed twice; {name!r} is the same name")
        listed[name] = _principal(name, entry)
    return listed


def _identity(text: str) -> str:
    """The name as certificates have it."""
    where = shortened(text)
    if not text or len(text) > MAX_IDENTITY_CHARS or not text.isprintable():
        raise InvalidAccessFile(f"{where}: is not a name of 1 to {MAX_IDENTITY_CHARS} printable characters")
    if (name := identity(text)) is None:
        raise InvalidAccessFile(f"{where}: no certificate authenticates by such a name; {IDENTITY_FORM}")
    return name


def _principal(name: str, entry: object) -> Principal:
    where = shortened(name)
    check_fields(entry, where, required=["tenants", "roles"], optional=["adapters"])
    assert isinstance(entry, dict)  # checked above
    return read_grant(entry, where).principal(f"cert:{name}")
