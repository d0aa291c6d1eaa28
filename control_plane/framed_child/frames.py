"""What the server and a child send each other, and the child's end of the socket. Imports little, to start fast."""

from __future__ import annotations

import resource
import struct
from io import BufferedRWPair
from pathlib import Path
from typing import Any

# Length of what follows in bytes; whether that is a result (1) or an error message (0). Then the UTF-8.
FRAME_HEADER = struct.Struct("<IB")


def read_frame(stream: BufferedRWPair[Any, Any]) -> bytes | None:
    """The next frame's bytes; None where the server closed the socket."""
    header = stream.read(FRAME_HEADER.size)
    if len(header) < FRAME_HEADER.size:
        return None
    size_bytes, _ = FRAME_HEADER.unpack(header)
    return bytes(stream.read(size_bytes))


def write_frame(stream: BufferedRWPair[Any, Any], text: str, *, is_result: bool) -> None:
    """Send a result, or an error message. Lone surrogates, which no text may hold, are replaced."""
    encoded = text.encode("utf-8", "replace")
    stream.write(FRAME_HEADER.pack(len(encoded), is_result))
    stream.write(encoded)
    stream.flush()


def limit_memory(num_bytes: int) -> None:
    """Bound what is allocated from here on. Only Linux reports what is in use, and only there the bound holds."""
    try:
        pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
    except OSError:
        return
    limit = pages * resource.getpagesize() + num_bytes
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
