"""`python -m tests.warm_starts.server FD MODULE...`: imports the modules, then forks a process for each request.

FD is a socket of packets. A request is JSON: the "module" to run as a program, its "arguments" and "environment"; with
it come two file descriptors, for stdout and stderr. The response is [pid, null]. When such a process has ended, [pid,
exit status] follows. The program ends with the socket; what it forked goes on.

The modules that are imported must start no threads, since a fork keeps only the thread that forks.
"""

from __future__ import annotations

import importlib
import json
import os
import runpy
import selectors
import socket
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from contract.process_log import quiet_grpc

MAX_REQUEST_BYTES = 1 << 17


def main(arguments: Sequence[str]) -> None:
    """Serve until the socket is closed; in a forked process, run what was requested."""
    control = socket.socket(fileno=int(arguments[0]))
    quiet_grpc()
    for name in arguments[1:]:
        importlib.import_module(name)
    num_threads = len(list(Path("/proc/self/task").iterdir()))
    assert num_threads == 1, f"imports have started threads, {num_threads} in all: a fork would lose them"
    request = _serve(control)
    if request is not None:
        sys.argv[1:] = request["arguments"]
        runpy.run_module(request["module"], run_name="__main__", alter_sys=True)


def _serve(control: socket.socket) -> dict[str, Any] | None:
    """The request of this process, which was forked for it; None in the one that forks, when all is over."""
    selector = selectors.DefaultSelector()
    selector.register(control, selectors.EVENT_READ)
    children: dict[int, int] = {}  # pid of what was forked and has not ended, by its pidfd
    while True:
        for key, _ in selector.select():
            if key.fileobj is not control:
                selector.unregister(key.fd)
                os.close(key.fd)
                pid, status = os.waitpid(children.pop(key.fd), 0)
                with suppress(BrokenPipeError):  # all is over
                    control.send(json.dumps([pid, os.waitstatus_to_exitcode(status)]).encode())
                continue
            data, descriptors, _, _ = socket.recv_fds(control, MAX_REQUEST_BYTES, 2)
            if not data:
                return None
            pid = os.fork()
            if pid == 0:
                selector.close()
                for descriptor in (control.detach(), *children):
                    os.close(descriptor)
                return _become(json.loads(data), descriptors)
            for descriptor in descriptors:
                os.close(descriptor)
            pidfd = os.pidfd_open(pid)
            children[pidfd] = pid
            selector.register(pidfd, selectors.EVENT_READ)
            control.send(json.dumps([pid, None]).encode())


def _become(request: dict[str, Any], descriptors: Sequence[int]) -> dict[str, Any]:
    """Take the environment and the files of a request."""
    os.environ.clear()
    os.environ.update(request["environment"])
    nothing = os.open(os.devnull, os.O_RDONLY)
    for descriptor, place in zip((nothing, *descriptors), (0, 1, 2), strict=True):
        os.dup2(descriptor, place)
        os.close(descriptor)
    return request


if __name__ == "__main__":
    main(sys.argv[1:])
