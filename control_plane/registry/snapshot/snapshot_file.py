"""A local file of plain values that is used whole or not at all: magic, SHA-256, then frames.

It lies in the server's own data directory, never in the artifact store: its values are read with `marshal`, which may
only be given what this server wrote. Anything may delete the file.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import logging
import marshal
import os
import struct
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

logger = logging.getLogger(__name__)

_MAGIC = b"motet-snapshot-1\n"
_LENGTH = struct.Struct("<I")
_PRIVATE = 0o600
_SHA256_BYTES = hashlib.sha256().digest_size


def write_frames(path: Path, subject: object, frames: Iterable[object]) -> None:
    """Write values in place of the file's. `subject` says of what they are. Raises OSError.

    Every frame gives other threads a turn at the interpreter: keep each one small.
    """
    temporary = path.with_name(path.name + ".tmp")
    digest = hashlib.sha256()
    with contextlib.suppress(FileNotFoundError):
        temporary.unlink()
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, _PRIVATE)
    with open(descriptor, "wb") as file:  # noqa: PTH123 - of a descriptor
        file.write(_MAGIC + bytes(_SHA256_BYTES))
        for frame in itertools.chain([_subject(subject)], frames):
            _write_frame(file, digest, frame)
        file.seek(len(_MAGIC))
        file.write(digest.digest())
    temporary.replace(path)


def read_frames(path: Path, subject: object) -> list[Any]:
    """The values of the file; none if it is missing, damaged, of another subject or of another Python."""
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        return []
    except OSError as error:
        logger.warning("snapshot not read path=%s error=%s", path, error)
        return []
    start = len(_MAGIC) + _SHA256_BYTES
    body = memoryview(content)[start:]
    if content[:start] != _MAGIC + hashlib.sha256(body).digest():
        logger.warning("snapshot damaged or of another version of Motet, left out path=%s", path)
        return []
    # Whole, so each of its frames is as it was written.
    frames = list(_frames(body, 1))
    if not frames or frames[0] != _subject(subject):
        logger.info("snapshot is of something else, left out path=%s", path)
        return []
    return list(_frames(body, None))[1:]


def _subject(subject: object) -> tuple[str, object]:
    """Values of another Python may mean something else to `marshal`."""
    return sys.version, subject


def _write_frame(file: Any, digest: Any, frame: Any) -> None:
    data = marshal.dumps(frame)
    piece = _LENGTH.pack(len(data)) + data
    digest.update(piece)
    file.write(piece)


def _frames(body: memoryview, count: int | None) -> Iterator[Any]:
    """The first `count` frames, or all of them."""
    position = 0
    while position < len(body) and count != 0:
        size = _LENGTH.unpack_from(body, position)[0]
        position += _LENGTH.size
        yield marshal.loads(body[position : position + size])
        position += size
        count = None if count is None else count - 1
