"""The file of API keys: its form, new keys, and changes of it while a server reads it.

A key is "motet_ID_SECRET". The file has the SHA-256 of the whole key and never the key: who reads the file cannot call
the server. The secret has 256 random bits, so a fast hash is enough; nobody can try them all.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import re
import secrets
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from control_plane.access.authentication.grants import (
    Grant,
    InvalidAccessFile,
    check_fields,
    read_grant,
    read_object,
    shortened,
)
from control_plane.access.watched_files import read_content

PREFIX = "motet_"  # of every key, so that scanners for leaked secrets find them
MAX_KEYS = 10_000
MAX_LABEL_CHARS = 128
SECRET_CHARS = 43  # of 62: 256 bits
_DIGITS = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"
_ID_DIGITS = "0123456789abcdefghijklmnopqrstuvwxyz"
_ID_CHARS = 10
_ID = re.compile(r"[a-z0-9]{1,32}")
ID_FORM = "use 1 to 32 characters of a-z and 0-9"
_SHA256 = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyEntry:
    """One key, as the file has it."""

    id: str
    sha256: str = field(repr=False)  # hexadecimal, of the whole key
    grant: Grant
    expires_s: float | None = None  # wall clock, seconds since 1970
    label: str = ""  # free text for people

    def as_json(self) -> dict[str, Any]:
        """The entry as the file has it."""
        entry: dict[str, Any] = {"id": self.id, "sha256": self.sha256, **self.grant.as_json()}
        if self.expires_s is not None:
            entry["expires"] = shown_time(self.expires_s)
        if self.label:
            entry["label"] = self.label
        return entry


def parse_keys(content: bytes) -> tuple[KeyEntry, ...]:
    """The keys in a file. Raises InvalidAccessFile."""
    document = read_object(content)
    check_fields(document, "the file", required=["keys"])
    keys = document["keys"]
    if not isinstance(keys, list):
        raise InvalidAccessFile(f"keys: is a JSON {type(keys).__name__}; use a list")
    if len(keys) > MAX_KEYS:
        raise InvalidAccessFile(f"keys: has {len(keys)} entries; at most {MAX_KEYS} are allowed")
    entries = tuple(_parse_entry(entry, f"keys[{index}]") for index, entry in enumerate(keys))
    for name in ("id", "sha256"):
        seen: dict[str, int] = {}
        for index, entry in enumerate(entries):
            first = seen.setdefault(getattr(entry, name), index)
            if first != index:
                raise InvalidAccessFile(f"keys[{index}].{name}: is that of keys[{first}]; every key needs its own")
    return entries


def new_key(taken: set[str], grant: Grant, *, expires_s: float | None = None, label: str = "") -> tuple[KeyEntry, str]:
    """A new entry whose id is not taken, and its key, which nobody can find out again. Raises InvalidAccessFile."""
    key_id = _random_text(_ID_DIGITS, _ID_CHARS)
    while key_id in taken:
        key_id = _random_text(_ID_DIGITS, _ID_CHARS)
    key = f"{PREFIX}{key_id}_{_random_text(_DIGITS, SECRET_CHARS)}"
    entry = KeyEntry(id=key_id, sha256=sha256_of(key), grant=grant, expires_s=expires_s, label=label)
    return _parse_entry(entry.as_json(), "the new key"), key


def sha256_of(key: str) -> str:
    """What the file keeps of a key."""
    return hashlib.sha256(key.encode()).hexdigest()


def change_keys(
    path: Path, change: Callable[[tuple[KeyEntry, ...]], tuple[KeyEntry, ...]], *, may_create: bool = False
) -> None:
    """Replace the keys of a file by what `change` makes of them: as a whole, readable by its owner only.

    Concurrent changes take turns. Raises InvalidAccessFile, OSError, or what `change` raises; the file then stays.
    """
    path = path.resolve()  # a symbolic link stays one
    with _locked(path):
        try:
            entries = read_keys(path)
        except FileNotFoundError:
            if not may_create:
                raise
            entries = ()
        _write(path, change(entries))


def read_keys(path: Path) -> tuple[KeyEntry, ...]:
    """The keys of a file. Raises InvalidAccessFile or OSError."""
    return parse_keys(read_content(path))


def shown_time(seconds: float) -> str:
    """A time in the form of the file: ISO 8601 in UTC, to the second."""
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def parse_time(text: object, where: str) -> float:
    """Seconds since 1970 of an ISO 8601 time with its zone. Raises InvalidAccessFile."""
    try:
        moment = datetime.fromisoformat(text) if isinstance(text, str) else None
        if moment is not None and moment.tzinfo is not None:
            return moment.timestamp()
    except (ValueError, OverflowError):
        pass
    raise InvalidAccessFile(f"{where}: {shortened(text)} is not a time with its zone, such as 2027-01-31T12:00:00Z")


def _parse_entry(entry: Any, where: str) -> KeyEntry:
    check_fields(entry, where, required=["id", "sha256", "tenants", "roles"], optional=["adapters", "expires", "label"])
    key_id, digest, label = entry["id"], entry["sha256"], entry.get("label", "")
    if not isinstance(key_id, str) or not _ID.fullmatch(key_id):
        raise InvalidAccessFile(f"{where}.id: {shortened(key_id)} is not valid: {ID_FORM}")
    where = f"{where} ({key_id})"
    if not isinstance(digest, str) or not _SHA256.fullmatch(digest):
        # The value is not repeated: somebody may have put the key itself there.
        raise InvalidAccessFile(f"{where}.sha256: is not the SHA-256 of a key: use 64 lower-case hexadecimal digits")
    if not isinstance(label, str) or len(label) > MAX_LABEL_CHARS or not label.isprintable():
        raise InvalidAccessFile(f"{where}.label: is not a printable text of at most {MAX_LABEL_CHARS} characters")
    return KeyEntry(
        id=key_id,
        sha256=digest,
        grant=read_grant(entry, where),
        expires_s=parse_time(entry["expires"], f"{where}.expires") if "expires" in entry else None,
        label=label,
    )


def _random_text(digits: str, length: int) -> str:
    return "".join(secrets.choice(digits) for _ in range(length))


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Alone among the processes that change the file. The lock has a file of its own, since the other is replaced."""
    descriptor = os.open(path.with_name(f"{path.name}.lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _write(path: Path, entries: tuple[KeyEntry, ...]) -> None:
    """Replace the file. A server that reads it meanwhile gets the former file or the new one."""
    content = json.dumps({"keys": [entry.as_json() for entry in entries]}, indent=2).encode() + b"\n"
    parse_keys(content)  # what is written can be read
    descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")  # with mode 0600
    try:
        with os.fdopen(descriptor, "wb") as opened:
            _keep_owner(path, descriptor)
            opened.write(content)
            opened.flush()
            os.fsync(opened.fileno())
        Path(name).replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            Path(name).unlink()
        raise


def _keep_owner(path: Path, descriptor: int) -> None:
    """Root may change the file of a server that runs as another user; that user must still be able to read it."""
    with contextlib.suppress(FileNotFoundError, PermissionError):
        former = path.stat()
        os.fchown(descriptor, former.st_uid, former.st_gid)
