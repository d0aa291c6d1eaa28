"""Starts Motet's processes for the demo, the benchmarks and the tests, and ends, kills and restarts them.

Ports are the operating system's choice, read from the ready lines; a restarted control plane gets the ports it had.
The control plane brings its embedded Redis.
"""

from __future__ import annotations

import os
import queue
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import IO, Protocol, Self

from contract.ready_lines import CONTROL_PLANE_READY, WORKER_READY

ROOT = Path(__file__).resolve().parents[1]


class StartFailed(Exception):
    """A process did not get ready; the message ends with its log."""


class Process(Protocol):
    """What is used of subprocess.Popen."""

    pid: int
    stdout: IO[bytes] | None

    def poll(self) -> int | None: ...
    def wait(self, timeout: float | None = None) -> int: ...
    def send_signal(self, sig: int) -> None: ...
    def kill(self) -> None: ...


# Starts the interpreter: its arguments, its whole environment, the file for its stderr.
Start = Callable[[Sequence[str], Mapping[str, str], IO[bytes]], Process]


def start_python(arguments: Sequence[str], environment: Mapping[str, str], log: IO[bytes]) -> Process:
    """A new interpreter."""
    return subprocess.Popen(
        [sys.executable, *arguments],
        cwd=ROOT,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=log,
    )


class Child:
    """One Python process: its stdout is watched for lines, its stderr goes to a log file."""

    def __init__(
        self,
        name: str,
        arguments: Sequence[str],
        log_path: Path,
        *,
        environment: Mapping[str, str] | None = None,
        start: Start = start_python,
    ) -> None:
        """Start the interpreter with these arguments; `environment` is added to this process's own."""
        self.name = name
        self._log_path = log_path
        path = os.pathsep.join([str(ROOT), str(ROOT / "client"), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
        log_path.parent.mkdir(parents=True, exist_ok=True)
        whole = {**os.environ, "PYTHONPATH": path, "PYTHONUNBUFFERED": "1", **(environment or {})}
        with log_path.open("ab") as log:
            self._process = start(arguments, whole, log)
        # None: the process closed its stdout.
        self._lines: queue.Queue[str | None] = queue.Queue()
        assert self._process.stdout is not None
        self._reader = threading.Thread(target=self._read, args=(self._process.stdout,), daemon=True)
        self._reader.start()

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def exit_code(self) -> int | None:
        """Its exit status, below zero for a signal; None while it runs."""
        return self._process.poll()

    def wait_ready(self, pattern: re.Pattern[str], timeout_s: float) -> re.Match[str]:
        """The match of the ready line. Raises StartFailed with the tail of the log."""
        deadline_s = time.monotonic() + timeout_s
        while True:
            try:
                line = self._lines.get(timeout=max(deadline_s - time.monotonic(), 0.0))
            except queue.Empty:
                raise StartFailed(f"{self.name} was not ready within {timeout_s:g} s\n{self.log_tail()}") from None
            if line is None:
                code = self._process.wait()
                raise StartFailed(f"{self.name} ended with status {code} before it was ready\n{self.log_tail()}")
            if match := pattern.search(line):
                return match

    def log_tail(self, num_lines: int = 20) -> str:
        """The end of its stderr."""
        lines = self._log_path.read_text(encoding="utf-8", errors="replace").splitlines()
        return "\n".join(lines[-num_lines:])

    @property
    def is_running(self) -> bool:
        """Whether the process has not ended."""
        return self._process.poll() is None

    def send(self, signum: int) -> None:
        """Send a signal, if it still runs."""
        self._process.send_signal(signum)

    def kill(self) -> None:
        """End it at once, and wait until it is gone."""
        self._process.kill()
        self._process.wait()

    def stop(self, timeout_s: float = 20.0) -> int:
        """Ask it to end, insist after `timeout_s`; its exit status. Idempotent."""
        for signum in (signal.SIGCONT, signal.SIGTERM):
            self._process.send_signal(signum)
        try:
            code = self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self._process.kill()
            code = self._process.wait()
        self._reader.join()
        return code

    def _read(self, stdout: IO[bytes]) -> None:
        with stdout:
            for line in stdout:
                self._lines.put(line.decode(errors="replace").rstrip())
        self._lines.put(None)


class System:
    """A control plane and any number of workers. A context manager: entering it starts the control plane.

    Leaving it ends every process, workers first; `exit_codes` then has the exit status of each by its name.
    """

    def __init__(
        self,
        model_dir: Path,
        work_dir: Path,
        *,
        control_flags: Sequence[str] = (),
        control_command: Sequence[str] = ("-m", "control_plane"),
        environment: Mapping[str, str] | None = None,
        timeout_s: float = 120.0,
        start: Start = start_python,
    ) -> None:
        """`control_command` follows the interpreter. `timeout_s` is the time that each process has to get ready;
        `environment` is added to this process's own. `start` starts each process."""
        self.model_dir = model_dir
        self.work_dir = work_dir
        self.control_plane: Child
        self.workers: dict[str, Child] = {}  # by worker id
        self.address = ""  # HOST:PORT of the client services, once started
        self.worker_address = ""  # HOST:PORT for workers, once started
        self.exit_codes: dict[str, int] = {}
        self._control_flags = list(control_flags)
        self._control_command = list(control_command)
        self._environment = dict(environment or {})
        self._timeout_s = timeout_s
        self._start = start

    def __enter__(self) -> Self:
        try:
            self.start_control_plane()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.stop()

    @property
    def data_dir(self) -> Path:
        """The control plane's --data-dir."""
        return self.work_dir / "data"

    def start_control_plane(self) -> None:
        """Start it, or start it again on the ports it had."""
        listen, worker_listen = self.address or "127.0.0.1:0", self.worker_address or "127.0.0.1:0"
        self.control_plane = self._child(
            "control-plane",
            [
                *self._control_command,
                *("--model", str(self.model_dir), "--data-dir", str(self.data_dir)),
                *("--listen", listen, "--worker-listen", worker_listen),
                *self._control_flags,
            ],
        )
        match = self.control_plane.wait_ready(CONTROL_PLANE_READY, self._timeout_s)
        self.address, self.worker_address = match["clients"], match["workers"]

    def start_worker(
        self,
        worker_id: str = "worker",
        flags: Sequence[str] = (),
        *,
        command: Sequence[str] = ("-m", "data_plane"),
        control_plane: str = "",
        wait: bool = True,
    ) -> Child:
        """Start a worker, in place of one of the same id.

        `command` follows the interpreter. `control_plane`: HOST:PORT, where it is not the system's own.
        `wait`: until the worker is ready.
        """
        if worker_id in self.workers:
            self.workers.pop(worker_id).kill()
        addresses = ["--worker-id", worker_id, "--control-plane", control_plane or self.worker_address]
        worker = self._child(worker_id, [*command, "--model", str(self.model_dir), *addresses, *flags])
        self.workers[worker_id] = worker
        if wait:
            worker.wait_ready(WORKER_READY, self._timeout_s)
        return worker

    def stop(self) -> None:
        """End the workers, then the control plane. Idempotent."""
        for worker_id, worker in self.workers.items():
            self.exit_codes[worker_id] = worker.stop()
        self.workers.clear()
        if hasattr(self, "control_plane"):
            self.exit_codes["control plane"] = self.control_plane.stop()

    def _child(self, name: str, arguments: Sequence[str]) -> Child:
        log_path = self.work_dir / "logs" / f"{name}.log"
        return Child(name, arguments, log_path, environment=self._environment, start=self._start)
