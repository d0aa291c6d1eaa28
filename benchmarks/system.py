"""Starts Motet's processes for the demo, the benchmarks and the tests, and ends them again.

The control plane brings its embedded Redis. Ports are the system's choice, read from the ready lines.
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
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import IO, Self

ROOT = Path(__file__).resolve().parents[1]
CONTROL_PLANE_READY = re.compile(r"motet control-plane ready clients=(\S+) workers=(\S+)")
WORKER_READY = re.compile(r"motet worker ready worker_id=(\S+) epoch=(\d+)")


class StartFailed(Exception):
    """A process did not get ready; the message ends with its log."""


class Child:
    """One Python process: its stdout is watched for lines, its stderr goes to a log file."""

    def __init__(
        self, name: str, arguments: Sequence[str], log_path: Path, *, environment: Mapping[str, str] | None = None
    ) -> None:
        """Start the interpreter with these arguments; `environment` is added to this process's own."""
        self.name = name
        self._log_path = log_path
        path = os.pathsep.join([str(ROOT), str(ROOT / "client"), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
        log_path.parent.mkdir(parents=True, exist_ok=True)
        with log_path.open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, *arguments],
                cwd=ROOT,
                env={**os.environ, "PYTHONPATH": path, "PYTHONUNBUFFERED": "1", **(environment or {})},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=log,
            )
        # None: the process closed its stdout.
        self._lines: queue.Queue[str | None] = queue.Queue()
        assert self._process.stdout is not None
        self._reader = threading.Thread(target=self._read, args=(self._process.stdout,), daemon=True)
        self._reader.start()

    @property
    def pid(self) -> int:
        return self._process.pid

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


@dataclass
class System:
    """A control plane and one worker. A context manager: leaving it ends both; `exit_codes` tells how."""

    model_dir: Path
    data_dir: Path
    control_plane_args: Sequence[str] = ()
    worker_args: Sequence[str] = ()
    worker_command: Sequence[str] = ("-m", "data_plane")  # after the interpreter
    timeout_s: float = 120.0  # to be ready, each process
    clients: str = ""  # HOST:PORT of the client services, once started
    exit_codes: dict[str, int] = field(default_factory=dict)
    children: list[Child] = field(default_factory=list)

    def __enter__(self) -> Self:
        try:
            self._start()
        except BaseException:
            self.stop()
            raise
        return self

    def _start(self) -> None:
        listen = ["--listen", "127.0.0.1:0", "--worker-listen", "127.0.0.1:0"]
        model = ["--model", str(self.model_dir)]
        command = ["-m", "control_plane", *model, "--data-dir", str(self.data_dir), *listen]
        control_plane = Child(
            "control plane", [*command, *self.control_plane_args], self.data_dir / "logs" / "control-plane.log"
        )
        self.children.append(control_plane)
        ready = control_plane.wait_ready(CONTROL_PLANE_READY, self.timeout_s)
        self.clients, workers = ready.group(1), ready.group(2)
        command = [*self.worker_command, "--control-plane", workers, *model]
        worker = Child("worker", [*command, *self.worker_args], self.data_dir / "logs" / "worker.log")
        self.children.append(worker)
        worker.wait_ready(WORKER_READY, self.timeout_s)

    def stop(self) -> None:
        """End the worker, then the control plane. Idempotent."""
        while self.children:
            child = self.children.pop()
            self.exit_codes[child.name] = child.stop()

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.stop()
