"""Renders conversations for the server: `python -m control_plane.api.text.render_process`, run by `chat_renderer.py`.

A process of its own, so that a template that never ends, or that takes all memory, ends alone. Standard input is a
socket: one frame with the template comes in, then one for each conversation, and each is answered by one frame. The
kernel kills the process by SIGPROF when one of them takes more CPU time than it may.
"""

from __future__ import annotations

import json
import resource
import signal
import socket
import sys
from io import BufferedRWPair
from pathlib import Path
from typing import Any

from control_plane.api.text.chat_template import ChatTemplate, ChatTemplateError
from control_plane.api.text.frames import FRAME_HEADER


def main() -> int:
    """Render conversations until the server closes the socket."""
    with socket.socket(fileno=sys.stdin.fileno()) as sock, sock.makefile("rwb") as stream:
        setup = json.loads(_read(stream) or "{}")
        cpu_limit_s = float(setup["cpu_limit_s"])
        _limit_memory(int(setup["memory_limit_bytes"]))
        signal.setitimer(signal.ITIMER_PROF, cpu_limit_s)
        try:
            template = ChatTemplate(setup["source"], setup["special_tokens"])
        except ChatTemplateError as error:
            _respond(stream, str(error), is_text=False)
            return 1
        _respond(stream, "", is_text=True)
        while (request := _read(stream)) is not None:
            signal.setitimer(signal.ITIMER_PROF, cpu_limit_s)
            conversation = json.loads(request)
            try:
                text, is_text = template.render(**conversation), True
            except ChatTemplateError as error:
                text, is_text = str(error), False
            _respond(stream, text, is_text=is_text)
    return 0


def _read(stream: BufferedRWPair[Any, Any]) -> bytes | None:
    """The next frame's bytes; None where the server closed the socket."""
    signal.setitimer(signal.ITIMER_PROF, 0.0)
    header = stream.read(FRAME_HEADER.size)
    if len(header) < FRAME_HEADER.size:
        return None
    size_bytes, _ = FRAME_HEADER.unpack(header)
    return bytes(stream.read(size_bytes))


def _respond(stream: BufferedRWPair[Any, Any], text: str, *, is_text: bool) -> None:
    # A template can make lone surrogates, which no prompt may hold.
    encoded = text.encode("utf-8", "replace")
    stream.write(FRAME_HEADER.pack(len(encoded), is_text))
    stream.write(encoded)
    stream.flush()


def _limit_memory(num_bytes: int) -> None:
    """Bound what is allocated from here on. Only Linux reports what is in use, and only there the bound holds."""
    try:
        pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
    except OSError:
        return
    limit = pages * resource.getpagesize() + num_bytes
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


if __name__ == "__main__":
    sys.exit(main())
