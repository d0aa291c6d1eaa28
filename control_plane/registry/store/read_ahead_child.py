"""A process that reads files of a store's directory for a start, see read_ahead.py. Imports little, to start fast.

Standard input has frames with a list of pairs: a key, and the tag under which its content is known (None: only whether
the key has content is of interest). Standard output has frames with a result for each pair, in their order: what
`store.read_document` gives, True for a key that is there, or None for whatever went wrong.

Documents come as beginning, end and tag: most versions end alike, in thousands of bytes, and `marshal` writes an object
once for a frame.
"""

from __future__ import annotations

import marshal
import struct
import sys
from pathlib import Path
from typing import Any, BinaryIO, TypeAlias

from control_plane.registry.store.directory_store import DirectoryStore
from control_plane.registry.store.store import read_document

FRAME_LENGTH = struct.Struct("<Q")
Look: TypeAlias = tuple[str, str | None]
Found: TypeAlias = tuple[bytes, bytes, str] | bool | None
_FRAME_SIZE = 256  # results, of a few KiB each


class _NoFence:
    """The server holds the lock, and looks itself at what is missing here."""

    is_sole = False

    def lock(self) -> None: ...

    def close(self) -> None: ...

    def check(self) -> None: ...


def main() -> None:
    """Give results until standard input ends."""
    looks = Looks(DirectoryStore(Path(sys.argv[1]), fence=_NoFence()))
    while (requested := read_frame(sys.stdin.buffer)) is not None:
        for start in range(0, len(requested), _FRAME_SIZE):
            write_frame(sys.stdout.buffer, [looks.found(look) for look in requested[start : start + _FRAME_SIZE]])


class Looks:
    """Reads documents, and remembers how the last one ended."""

    def __init__(self, store: DirectoryStore) -> None:
        self._store = store
        self._end = b""

    def found(self, look: Look) -> Found:
        """The result of one look."""
        key, known_tag = look
        try:
            if known_tag is None:
                return True if self._store.head(key) is not None else None
            content, tag = read_document(self._store, key, known_tag)
        except OSError:
            return None
        if not (self._end and content.endswith(self._end)):
            self._end = content[content.find(b"[") :] if b"[" in content else b""  # from the first list on
        return content[: len(content) - len(self._end)], self._end, tag


def read_frame(file: BinaryIO) -> list[Any] | None:
    """The next list; None at the end, also where it comes too early."""
    header = file.read(FRAME_LENGTH.size)
    if len(header) < FRAME_LENGTH.size:
        return None
    (size_bytes,) = FRAME_LENGTH.unpack(header)
    data = file.read(size_bytes)
    return marshal.loads(data) if len(data) == size_bytes else None


def write_frame(file: BinaryIO, values: list[Any]) -> None:
    """Send a list. Raises BrokenPipeError where nobody reads."""
    data = marshal.dumps(values)
    file.write(FRAME_LENGTH.pack(len(data)))
    file.write(data)
    file.flush()


if __name__ == "__main__":
    try:
        main()
    except BrokenPipeError:  # the server does not want the rest
        sys.stderr.close()
