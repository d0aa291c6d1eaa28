"""The test's side: starts such a process and looks like subprocess.Popen to what started it."""

from __future__ import annotations

import atexit
import functools
import json
import os
import queue
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import IO

from benchmarks.system import ROOT, Process, start_python
from tests.warm_starts.server import MAX_REQUEST_BYTES

# What workers import, and the models of most tests.
IMPORTED = (
    "data_plane.engine.build",
    "transformers.models.llama.modeling_llama",
    "transformers.models.qwen2.modeling_qwen2",
)
# Programs that import that much.
WARM = frozenset({"data_plane", "tests.fakes.doubling_worker", "tests.fakes.late_worker"})
# Variables that are read while modules are imported: a process with other values must import them itself.
READ_AT_IMPORT = (
    "CUDA",
    "GOMP",
    "GRPC",
    "HF_",
    "HOME",
    "KMP",
    "MKL",
    "OMP",
    "PYT",
    "TORCH",
    "TRANSFORMERS",
    "TRITON",
    "XDG_",
)


class WarmProcess:
    """A process that another one forked."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.stdout: IO[bytes] | None = None
        self._ended = threading.Event()
        self._exit_code: int | None = None

    def poll(self) -> int | None:
        """Its exit status, below zero for a signal; None while it runs."""
        return self._exit_code

    def wait(self, timeout: float | None = None) -> int:
        """Its exit status. Raises subprocess.TimeoutExpired after `timeout` seconds."""
        if not self._ended.wait(timeout):
            raise subprocess.TimeoutExpired(f"process {self.pid}", timeout or 0.0)
        assert self._exit_code is not None
        return self._exit_code

    def send_signal(self, sig: int) -> None:
        """Send it a signal, if it still runs."""
        if self._exit_code is None:
            with suppress(ProcessLookupError):
                os.kill(self.pid, sig)

    def kill(self) -> None:
        """End it at once."""
        self.send_signal(signal.SIGKILL)

    def end(self, exit_code: int) -> None:
        """It has ended with this status."""
        self._exit_code = exit_code
        self._ended.set()


class WarmStarts:
    """The process that forks. It ends with the one that it works for.

    `environment`: all of its variables. `imported`: the modules that it imports.
    """

    def __init__(self, environment: Mapping[str, str], imported: Sequence[str] = IMPORTED) -> None:
        here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.environment = import_environment(environment)
        with there:
            self._server = subprocess.Popen(
                [sys.executable, "-m", "tests.warm_starts.server", str(there.fileno()), *imported],
                cwd=ROOT,
                env=environment,
                stdin=subprocess.DEVNULL,
                pass_fds=[there.fileno()],
                start_new_session=True,  # Ctrl-C at a terminal ends the tests, which then end what they started
            )
        self._socket = here
        self._turn = threading.Lock()  # one start after the other
        # None: the process that forks has ended.
        self._started: queue.Queue[WarmProcess | None] = queue.Queue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        atexit.register(self.close)

    def start(self, arguments: Sequence[str], environment: Mapping[str, str], log: IO[bytes]) -> WarmProcess:
        """Run `-m MODULE ARGUMENTS` with this environment; its stderr goes to `log`. Raises EOFError."""
        _, module, *rest = arguments
        request = json.dumps({"module": module, "arguments": rest, "environment": dict(environment)}).encode()
        assert len(request) <= MAX_REQUEST_BYTES
        read, write = os.pipe()
        stdout = os.fdopen(read, "rb")
        with self._turn:
            try:
                with suppress(BrokenPipeError, ConnectionResetError):  # the reader learns it, too
                    socket.send_fds(self._socket, [request], [write, log.fileno()])
            finally:
                os.close(write)
            process = self._started.get()
        if process is None:
            self._started.put(None)
            stdout.close()
            raise EOFError("the process that forks has ended")
        process.stdout = stdout
        return process

    def close(self) -> None:
        """End the process that forks."""
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._reader.join()
        self._socket.close()
        self._server.wait()

    def _read(self) -> None:
        processes: dict[int, WarmProcess] = {}  # that have not ended, by pid
        while data := self._receive():
            pid, exit_code = json.loads(data)
            if exit_code is None:
                processes[pid] = WarmProcess(pid)
                self._started.put(processes[pid])
            else:
                processes.pop(pid).end(exit_code)
        for process in processes.values():  # nobody reports their ends any more
            process.kill()
            process.end(-signal.SIGKILL)
        self._started.put(None)

    def _receive(self) -> bytes:
        with suppress(ConnectionResetError):  # it has ended with requests that it has not read
            return self._socket.recv(MAX_REQUEST_BYTES)
        return b""


def import_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """The variables that decide what an import does; pytest's name of the running test is none."""
    return {
        name: value
        for name, value in environment.items()
        if name.startswith(READ_AT_IMPORT) and not name.startswith("PYTEST")
    }


@functools.cache
def warm_starts() -> list[WarmStarts]:
    """The one of this test process, once there is one."""
    return []


def start_warm(arguments: Sequence[str], environment: Mapping[str, str], log: IO[bytes]) -> Process:
    """Start the interpreter with these arguments: forked where torch would be imported, else as any other process.

    The first environment is that of the process that forks.
    """
    if arguments[0] == "-m" and arguments[1] in WARM:
        starts = warm_starts()
        if not starts:
            starts.append(WarmStarts(environment))
        if import_environment(environment) == starts[0].environment:
            return starts[0].start(arguments, environment, log)
    return start_python(arguments, environment, log)
