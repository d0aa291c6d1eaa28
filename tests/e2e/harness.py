"""Runs the whole system as a user would: a control plane process, worker processes, real Redis, the SDK.

`benchmarks.system.System` starts, kills and ends the processes; this one adds what tests need: hash workers, SDK
clients, the embedded Redis. The tests use nothing but the public flags, the SDK and signals.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import psutil
from motet import Adapter, AdapterVersion, Client

from benchmarks.system import ROOT, Child, System as Processes
from tests.secret_scan import ENVIRONMENT, SCAN, plant_redis_passwords
from tests.warm_starts.processes import start_warm

__all__ = ["ROOT", "System", "active_version", "wait_until"]

HASH_WORKER = ("-m", "tests.fakes.hash_worker")


class System(Processes):
    """A control plane with workers. Use as a context manager."""

    def __init__(
        self,
        model_dir: Path,
        work_dir: Path,
        *,
        control_flags: Sequence[str] = (),
        control_command: Sequence[str] = ("-m", "control_plane"),
    ) -> None:
        # A loaded two-core machine imports torch in a quarter of a minute.
        super().__init__(
            model_dir,
            work_dir,
            control_flags=control_flags,
            control_command=control_command,
            environment={"OMP_NUM_THREADS": "1", **ENVIRONMENT},
            start=start_warm,
        )
        self._clients: list[Client] = []

    def stop(self) -> None:
        """Close the clients, then end every process."""
        for client in self._clients:
            client.close()
        self._clients.clear()
        super().stop()
        SCAN.look_at_files("the log of", self.work_dir.glob("logs/*.log"))

    def start_control_plane(self) -> None:
        """Start it, or start it again on the ports it had."""
        super().start_control_plane()
        plant_redis_passwords(self.data_dir)
        SCAN.look_at_arguments(self.control_plane.pid)

    def start_worker(
        self,
        worker_id: str = "w0",
        flags: Sequence[str] = (),
        *,
        command: Sequence[str] = ("-m", "data_plane", "--device", "cpu", "--threads", "1"),
        control_plane: str = "",
        wait: bool = True,
    ) -> Child:
        """A real worker: torch, the checkpoint, the arena."""
        return super().start_worker(worker_id, flags, command=command, control_plane=control_plane, wait=wait)

    def start_hash_worker(
        self, worker_id: str = "w0", flags: Sequence[str] = (), *, control_plane: str = "", wait: bool = True
    ) -> Child:
        """A fake worker whose tokens are a hash chain (tests/fakes/hash_worker.py)."""
        return self.start_worker(worker_id, flags, command=HASH_WORKER, control_plane=control_plane, wait=wait)

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


def active_version(adapter: Adapter) -> AdapterVersion:
    """What new requests get of an adapter that has a version."""
    assert adapter.active_version is not None, f"{adapter.id} has no active version"
    return adapter.active_version
