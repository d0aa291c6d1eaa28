"""Runs the whole system as a user would: a control plane process, worker processes, real Redis, the SDK.

`System` starts and ends the processes, reads the addresses from their ready lines, and can kill any of them. The
tests of this folder use nothing but the public flags, the SDK and signals.
"""

from __future__ import annotations

import contextlib
import os
import queue
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import psutil
from motet import Client

ROOT = Path(__file__).resolve().parents[2]
READY_TIMEOUT_S = 120.0  # a loaded two-core machine imports torch in a quarter of a minute


class Process:
    """One child process whose standard output is read line by line."""

    def __init__(self, name: str, argv: Sequence[str], log_path: Path) -> None:
        self.name = name
        self._log_path = log_path
        self._log = log_path.open("ab")
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "client")]),
            "PYTHONUNBUFFERED": "1",
            "OMP_NUM_THREADS": "1",
        }
        self._popen = subprocess.Popen(
            [sys.executable, *argv],
            cwd=ROOT,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
        )
        self._lines: queue.Queue[str] = queue.Queue()
        self._reader = threading.Thread(target=self._read, name=f"{name}-stdout", daemon=True)
        self._reader.start()

    @property
    def pid(self) -> int:
        return self._popen.pid

    def wait_for(self, pattern: str) -> re.Match[str]:
        """The first line of output that matches; raises with the log's end if the process dies first."""
        deadline = time.monotonic() + READY_TIMEOUT_S
        while True:
            try:
                line = self._lines.get(timeout=max(deadline - time.monotonic(), 0.01))
            except queue.Empty:
                raise AssertionError(f"{self.name}: no line like {pattern!r}\n{self.log_tail()}") from None
            if line == "":
                raise AssertionError(f"{self.name} ended with {self._popen.wait()}\n{self.log_tail()}")
            if match := re.search(pattern, line):
                return match

    def send(self, signum: int) -> None:
        self._popen.send_signal(signum)

    def kill(self) -> None:
        """SIGKILL, and wait until it is gone."""
        with contextlib.suppress(ProcessLookupError):
            self._popen.kill()
        self._popen.wait()

    def terminate(self, timeout_s: float = 40.0) -> int:
        """SIGTERM, and the exit status."""
        with contextlib.suppress(ProcessLookupError):
            self._popen.send_signal(signal.SIGCONT)
            self._popen.terminate()
        return self._popen.wait(timeout_s)

    def close(self) -> None:
        self.kill()
        self._reader.join()
        assert self._popen.stdout is not None
        self._popen.stdout.close()
        self._log.close()

    def log_tail(self, num_chars: int = 4000) -> str:
        return self._log_path.read_text(encoding="utf-8", errors="replace")[-num_chars:]

    def _read(self) -> None:
        assert self._popen.stdout is not None
        for line in self._popen.stdout:
            self._lines.put(line.rstrip("\n") or " ")
        self._lines.put("")


class System:
    """A control plane with workers. Use as a context manager."""

    def __init__(self, model_dir: Path, work_dir: Path, *, control_flags: Sequence[str] = ()) -> None:
        self.model_dir = model_dir
        self.work_dir = work_dir
        self.workers: dict[str, Process] = {}
        self._control_flags = list(control_flags)
        self._listen = "127.0.0.1:0"
        self._worker_listen = "127.0.0.1:0"
        self._clients: list[Client] = []
        self.control_plane: Process
        self.address = ""
        self.worker_address = ""

    def __enter__(self) -> System:
        self.start_control_plane()
        return self

    def __exit__(self, *exc_info: object) -> None:
        for client in self._clients:
            client.close()
        for process in [*self.workers.values(), self.control_plane]:
            if process._popen.poll() is None:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.terminate(timeout_s=15.0)
            process.close()

    def start_control_plane(self) -> None:
        """Start it, or start it again on the ports it had."""
        self.control_plane = Process(
            "control-plane",
            [
                *("-m", "control_plane", "--model", str(self.model_dir), "--data-dir", str(self.work_dir / "data")),
                *("--listen", self._listen, "--worker-listen", self._worker_listen),
                *self._control_flags,
            ],
            self.work_dir / "control-plane.log",
        )
        match = self.control_plane.wait_for(r"ready clients=(\S+) workers=(\S+)")
        self.address, self.worker_address = match.group(1), match.group(2)
        self._listen, self._worker_listen = self.address, self.worker_address

    def start_worker(self, worker_id: str = "w0", flags: Sequence[str] = (), *, wait: bool = True) -> Process:
        """A real worker: torch, the checkpoint, the arena."""
        argv = ["-m", "data_plane", "--model", str(self.model_dir), "--device", "cpu", "--threads", "1"]
        return self._start_worker(worker_id, [*argv, *flags], wait=wait)

    def start_hash_worker(self, worker_id: str = "w0", flags: Sequence[str] = (), *, wait: bool = True) -> Process:
        """A fake worker whose tokens are a hash chain (tests/fakes/hash_worker.py)."""
        argv = ["-m", "tests.fakes.hash_worker", "--model", str(self.model_dir)]
        return self._start_worker(worker_id, [*argv, *flags], wait=wait)

    def _start_worker(self, worker_id: str, argv: list[str], *, wait: bool) -> Process:
        if worker_id in self.workers:
            self.workers.pop(worker_id).close()
        worker = Process(
            worker_id,
            [*argv, "--worker-id", worker_id, "--control-plane", self.worker_address],
            self.work_dir / f"{worker_id}.log",
        )
        self.workers[worker_id] = worker
        if wait:
            worker.wait_for(r"worker ready")
        return worker

    def client(self) -> Client:
        """An SDK client, closed with the system."""
        client = Client(self.address)
        self._clients.append(client)
        return client

    def redis_process(self) -> psutil.Process:
        """The embedded Redis server."""
        children = psutil.Process(self.control_plane.pid).children(recursive=True)
        return next(child for child in children if "redis" in child.name())


def wait_until(condition: Callable[[], bool], what: str, timeout_s: float = 30.0) -> None:
    """Poll an outside observable (a status RPC) until it holds."""
    deadline = time.monotonic() + timeout_s
    pause = threading.Event()
    while not condition():
        assert time.monotonic() < deadline, f"not within {timeout_s} s: {what}"
        pause.wait(0.05)
