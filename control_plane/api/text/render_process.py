"""Renders conversations for the server: `python -m control_plane.api.text.render_process`, run by `chat_renderer.py`.

A process of its own, so that a template that never ends, or that takes all memory, ends alone. Standard input is a
socket: one frame with the template comes in, then one for each conversation, and each is answered by one frame. The
kernel kills the process by SIGPROF when one of them takes more CPU time than it may.
"""

from __future__ import annotations

import json
import signal
import socket
import sys
from io import BufferedRWPair
from typing import Any

from control_plane.api.text.chat_template import ChatTemplate, ChatTemplateError
from control_plane.framed_child.frames import limit_memory, read_frame, write_frame


def main() -> int:
    """Render conversations until the server closes the socket."""
    with socket.socket(fileno=sys.stdin.fileno()) as sock, sock.makefile("rwb") as stream:
        setup = json.loads(_read(stream) or "{}")
        cpu_limit_s = float(setup["cpu_limit_s"])
        limit_memory(int(setup["memory_limit_bytes"]))
        signal.setitimer(signal.ITIMER_PROF, cpu_limit_s)
        try:
            template = ChatTemplate(setup["source"], setup["special_tokens"])
        except ChatTemplateError as error:
            write_frame(stream, str(error), is_result=False)
            return 1
        write_frame(stream, "", is_result=True)
        while (request := _read(stream)) is not None:
            signal.setitimer(signal.ITIMER_PROF, cpu_limit_s)
            conversation = json.loads(request)
            try:
                text, is_text = template.render(**conversation), True
            except ChatTemplateError as error:
                text, is_text = str(error), False
            write_frame(stream, text, is_result=is_text)
    return 0


def _read(stream: BufferedRWPair[Any, Any]) -> bytes | None:
    """The next frame's bytes; None where the server closed the socket. The time that it takes does not count."""
    signal.setitimer(signal.ITIMER_PROF, 0.0)
    return read_frame(stream)


if __name__ == "__main__":
    sys.exit(main())
