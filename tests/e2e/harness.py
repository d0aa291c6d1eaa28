"""Runs the whole system as a user would: a control plane process, worker processes, real Redis, the SDK.

`System` starts and ends the processes, reads the addresses from their ready lines, and can kill any of them. The
tests of this folder use nothing but the public flags, the SDK and signals.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import psutil
from motet import Client

from benchmarks.system import CONTROL_PLANE_READY, ROOT, WORKER_READY, Child

__all__ = ["ROOT", "System", "wait_until"]

READY_TIMEOUT_S = 120.0  # a loaded two-core machine imports torch in a quarter of a minute


class System:
    """A control plane with workers. Use as a context manager."""

    def __init__(self, model_dir: Path, work_dir: Path, *, control_flags: Sequence[str] = ()) -> None:
        self.model_dir = model_dir
        self.work_dir = work_dir
        self.workers: dict[str, Child] = {}
        self._control_flags = list(control_flags)
        self._listen = "127.0.0.1:0"
        self._worker_listen = "127.0.0.1:0"
        self._clients: list[Client] = []
        self.control_plane: Child
        self.address = ""
        self.worker_address = ""

    def __enter__(self) -> System:
        self.start_control_plane()
        return self

    def __exit__(self, *exc_info: object) -> None:
        for client in self._clients:
            client.close()
        for process in [*self.workers.values(), self.control_plane]:
            process.stop(timeout_s=15.0)

    def start_control_plane(self) -> None:
        """Start it, or start it again on the ports it had."""
        self.control_plane = self._child(
            "control-plane",
            [
                *("-m", "control_plane", "--model", str(self.model_dir), "--data-dir", str(self.work_dir / "data")),
                *("--listen", self._listen, "--worker-listen", self._worker_listen),
                *self._control_flags,
            ],
        )
        match = self.control_plane.wait_ready(CONTROL_PLANE_READY, READY_TIMEOUT_S)
        self.address, self.worker_address = match.group(1), match.group(2)
        self._listen, self._worker_listen = self.address, self.worker_address

    def start_worker(self, worker_id: str = "w0", flags: Sequence[str] = (), *, wait: bool = True) -> Child:
        """A real worker: torch, the checkpoint, the arena."""
        argv = ["-m", "data_plane", "--model", str(self.model_dir), "--device", "cpu", "--threads", "1"]
        return self._start_worker(worker_id, [*argv, *flags], wait=wait)

    def start_hash_worker(self, worker_id: str = "w0", flags: Sequence[str] = (), *, wait: bool = True) -> Child:
        """A fake worker whose tokens are a hash chain (tests/fakes/hash_worker.py)."""
        argv = ["-m", "tests.fakes.hash_worker", "--model", str(self.model_dir)]
        return self._start_worker(worker_id, [*argv, *flags], wait=wait)

    def _start_worker(self, worker_id: str, argv: list[str], *, wait: bool) -> Child:
        if worker_id in self.workers:
            self.workers.pop(worker_id).kill()
        worker = self._child(worker_id, [*argv, "--worker-id", worker_id, "--control-plane", self.worker_address])
        self.workers[worker_id] = worker
        if wait:
            worker.wait_ready(WORKER_READY, READY_TIMEOUT_S)
        return worker

    def _child(self, name: str, arguments: list[str]) -> Child:
        return Child(name, arguments, self.work_dir / f"{name}.log", environment={"OMP_NUM_THREADS": "1"})

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
