"""A system that is broken on purpose: its processes, its adapters with their versions, its Redis, its store.

Every process has a lock, so that two faults never handle the same one. `whole()` brings everything back. What the rig
says of processes (resident bytes, descriptors) is read from outside.
"""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

import psutil
import redis
from motet import Client, MotetError, RetryPolicy, ServerStatus

from benchmarks.system import ROOT, Child
from control_plane.host_cache.embedded import find_redis_server
from tests.e2e.harness import System, active_version, wait_until
from tests.hostile.faults.adapters import AdapterMaker
from tests.hostile.faults.proxy_thread import ProxyThread
from tests.hostile.faults.truth import HashTruth, RealTruth, Truth

STEADY = [f"steady-{index}" for index in range(5)]  # never changed
TURNING = "turning"  # moves between its versions
NUM_TURNING_VERSIONS = 3
SLOW_READER_TIMEOUT_S = 6
# Small enough that blocks, rows and slots run short under the load.
HASH_FLAGS = ["--step-time-ms", "4", "--num-blocks", "256", "--max-rows", "16", "--num-slots", "4"]
HASH_FLAGS += ["--num-host-blocks", "128"]
REAL_FLAGS = ["--dtype", "float32", "--block-size", "4", "--num-blocks", "240", "--max-rows", "12", "--num-slots", "4"]
REAL_FLAGS += ["--arena-bytes", "64MiB", "--max-model-len", "128", "--token-budget", "64", "--host-kv-bytes", "4MiB"]
CONTROL_FLAGS = ["--slow-reader-timeout-s", str(SLOW_READER_TIMEOUT_S), "--swap-us-per-block", "0.1"]
REST_TIMEOUT_S = 60.0
# What only our own mistakes write into a log.
_BROKEN = re.compile(r"Traceback \(most recent call last\)|internal error|session failed|Segmentation|AssertionError")


@dataclass(frozen=True)
class ProcessUse:
    """What one process takes at one moment."""

    role: str  # "control plane", a worker's id or "redis"
    pid: int
    resident_bytes: int
    num_descriptors: int


class Rig:
    """A control plane with workers under faults. A context manager."""

    def __init__(
        self, work_dir: Path, *, is_real: bool = False, has_own_redis: bool = False, num_workers: int = 2
    ) -> None:
        self.work_dir = work_dir
        self.is_real = is_real
        self.has_own_redis = has_own_redis
        self.worker_ids = [f"w{index}" for index in range(num_workers)]
        self.adapters = AdapterMaker(work_dir / "adapters", is_real=is_real)
        self.truth: Truth
        self.system: System
        # Digests that each adapter may serve with; faults that change an adapter keep it true.
        self.digests: dict[str, set[str]] = {}
        self.proxy: ProxyThread  # before the port of clients; some of the load goes through it
        self.worker_proxy: ProxyThread  # before the port of workers
        self.admin: Client  # for the rig's own questions: no retries, short timeouts
        self._locks: dict[str, threading.Lock] = {}
        self._redis: subprocess.Popen[bytes] | None = None
        self._log_offsets: dict[Path, int] = {}
        self._stack = ExitStack()

    # ---- start and end ----

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            self._start(stack)
            self._stack = stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._stack.__exit__(kind, value, traceback)

    def _start(self, stack: ExitStack) -> None:
        model_dir = self.adapters.model_dir
        flags = list(CONTROL_FLAGS)
        if self.has_own_redis:
            self.start_redis()
            stack.callback(self.kill_redis)
            flags += ["--redis-url", self.redis_url, "--worker-redis-url", self.redis_url]
        self.system = stack.enter_context(System(model_dir, self.work_dir / "system", control_flags=flags))
        self.proxy = stack.enter_context(ProxyThread(int(self.system.address.rpartition(":")[2])))
        self.worker_proxy = stack.enter_context(ProxyThread(int(self.system.worker_address.rpartition(":")[2])))
        self.admin = stack.enter_context(self.client(retry=RetryPolicy(max_attempts=1)))
        for name in STEADY:
            self.register(name, name)
        versions = [f"{TURNING}-{index}" for index in range(NUM_TURNING_VERSIONS)]
        for version in versions:
            self.register(TURNING, version)
        self.truth = self._truth()
        for worker_id in self.worker_ids:
            self.start_worker(worker_id, wait=False)
        self.whole()

    def _truth(self) -> Truth:
        names = [*STEADY, TURNING]
        if not self.is_real:
            return HashTruth(self.adapters.model_dir, names)
        return RealTruth(
            self.adapters.model_dir,
            {digest: self.adapters.directory_of(digest) for name in names for digest in self.digests[name]},
            {name: sorted(self.digests[name]) for name in names},
        )

    def register(self, name: str, version: str) -> str:
        """Register one of the maker's adapters under a name; its digest."""
        directory = self.adapters.make(version)
        digest = active_version(self.admin.adapters.register(name, directory, timeout_s=60.0)).digest
        self.adapters.note(digest, version)
        self.digests.setdefault(name, set()).add(digest)
        return digest

    def client(self, **options: object) -> Client:
        """An SDK client; the caller closes it."""
        return Client(self.system.address, **options)  # type: ignore[arg-type]

    @property
    def addresses(self) -> list[str]:
        """Where clients connect to: the server itself, and the proxy."""
        return [self.system.address, f"127.0.0.1:{self.proxy.port}"]

    # ---- processes ----

    @contextmanager
    def hold(self, *roles: str) -> Iterator[None]:
        """Keep other faults from these processes."""
        with ExitStack() as stack:
            for role in sorted(roles):
                stack.enter_context(self._locks.setdefault(role, threading.Lock()))
            yield

    def start_worker(self, worker_id: str, *, wait: bool = False) -> Child:
        # The last one is reached over a network that faults can cut and freeze.
        proxy = f"127.0.0.1:{self.worker_proxy.port}" if worker_id == self.worker_ids[-1] else ""
        if self.is_real:
            return self.system.start_worker(worker_id, REAL_FLAGS, control_plane=proxy, wait=wait)
        return self.system.start_hash_worker(worker_id, HASH_FLAGS, control_plane=proxy, wait=wait)

    def worker(self, worker_id: str) -> Child:
        return self.system.workers[worker_id]

    def redis_process(self) -> psutil.Process | None:
        """The host cache's server, embedded or not; None while there is none."""
        try:
            if self._redis is not None:
                return psutil.Process(self._redis.pid)
            return self.system.redis_process()
        except (psutil.NoSuchProcess, StopIteration):
            return None

    @property
    def redis_url(self) -> str:
        return f"unix://{self._redis_socket}"

    @property
    def _redis_socket(self) -> Path:
        return self.work_dir / "redis.sock"

    def start_redis(self) -> None:
        """Start the rig's own Redis, which any command may be sent to."""
        self._redis_socket.unlink(missing_ok=True)
        self._redis = subprocess.Popen(
            [str(find_redis_server()), "--port", "0", "--unixsocket", str(self._redis_socket), "--save", ""],
            cwd=self.work_dir,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        wait_until(self._redis_socket.exists, "the rig's Redis listens")

    def kill_redis(self) -> None:
        if self._redis is not None:
            self._redis.kill()
            self._redis.wait()

    @contextmanager
    def redis_client(self) -> Iterator[redis.Redis]:
        """A connection to the rig's own Redis with all rights."""
        # The redis of a fault may be slow on a loaded machine; the default of the library is a few seconds.
        with redis.Redis.from_url(self.redis_url, socket_timeout=60.0) as connection:
            yield connection

    def whole(self) -> None:
        """Wake what is stopped, start what is not running, wait until all workers are attached and Redis responds."""
        control_plane = self.system.control_plane
        if control_plane.is_running:
            control_plane.send(signal.SIGCONT)
        else:
            self.system.start_control_plane()
        if self._redis is not None and self._redis.poll() is not None:
            self.start_redis()
        process = self.redis_process()
        if process is not None:
            process.send_signal(signal.SIGCONT)
        for worker_id in self.worker_ids:
            worker = self.system.workers.get(worker_id)
            if worker is None or not worker.is_running:
                self.start_worker(worker_id)
            else:
                worker.send(signal.SIGCONT)
        wait_until(self._is_whole, "every worker is attached and the host cache responds", REST_TIMEOUT_S)

    def _is_whole(self) -> bool:
        status = self.status()
        return (
            status is not None
            and sorted(worker.worker_id for worker in status.workers) == self.worker_ids
            and status.adapters.host_cache_available
        )

    # ---- what can be seen ----

    def status(self) -> ServerStatus | None:
        """None while nobody responds."""
        try:
            return self.admin.status()
        except MotetError:
            return None

    def wait_rest(self) -> str:
        """Wait until nothing is in flight; what is left where that does not come, empty otherwise."""
        try:
            wait_until(lambda: self._left() == "", "rest", REST_TIMEOUT_S)
        except AssertionError:
            return self._left()
        return ""

    def _left(self) -> str:
        status = self.status()
        if status is None:
            return "no status"
        left = {"requests": status.queues.num_requests, "waiting": status.queues.num_waiting}
        for worker in status.workers:
            for what in ("num_running", "num_waiting", "num_swapped", "num_blocks_held", "num_host_blocks_held"):
                left[f"{worker.worker_id} {what}"] = getattr(worker, what)
            left[f"{worker.worker_id} plans in flight"] = worker.num_plans_in_flight
        return ", ".join(f"{what}: {count}" for what, count in left.items() if count)

    def use(self) -> list[ProcessUse]:
        """What every process takes."""
        server = self.redis_process() if self._redis is not None else None
        found = use_of(self.system)
        return found if server is None else [*found, _use("redis", server)]

    def new_log_problems(self) -> list[str]:
        """Lines of the logs since the last look that tell of a mistake of ours."""
        found = []
        for path in sorted((self.work_dir / "system" / "logs").glob("*.log")):
            with path.open("rb") as log:
                log.seek(self._log_offsets.get(path, 0))
                text = log.read()
            self._log_offsets[path] = self._log_offsets.get(path, 0) + len(text)
            lines = text.decode("utf-8", "replace").splitlines()
            for number, line in enumerate(lines):
                if _BROKEN.search(line):
                    # A stack ends with the first line that is not indented: the error.
                    end = next((at for at in range(number + 1, len(lines)) if not lines[at].startswith(" ")), number)
                    said = [*lines[max(number - 1, 0) : number + 1], *lines[number + 1 : end + 1][-3:]]
                    found.append(f"{path.stem}: " + " | ".join(part.strip() for part in said)[:1000])
        return found

    def registered(self) -> dict[str, str]:
        """Active digest by name, as the server says once it responds."""
        wait_until(lambda: self.status() is not None, "the control plane responds", REST_TIMEOUT_S)
        return {
            adapter.id: active_version(adapter).digest if adapter.active_version is not None else ""
            for adapter in self.admin.adapters.list()
        }

    def store_dir(self) -> Path:
        return self.system.data_dir / "store"

    def start_client_process(self, seed: int) -> subprocess.Popen[bytes]:
        """A client in a process of its own; it prints a line when its streams have begun, and goes on until killed."""
        command = [sys.executable, "-m", "tests.hostile.faults.client_process", self.system.address, str(seed)]
        with (self.work_dir / "client.log").open("ab") as log:
            return subprocess.Popen(command, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=log)


def use_of(system: System, *, prefix: str = "") -> list[ProcessUse]:
    """What the processes of a system take, its embedded Redis included; those that end just now are left out."""
    roles = {"control plane": system.control_plane.pid}
    roles |= {worker_id: worker.pid for worker_id, worker in system.workers.items()}
    found = []
    with suppress(psutil.NoSuchProcess, StopIteration):
        found.append(_use(f"{prefix}redis", system.redis_process()))
    for role, pid in roles.items():
        with suppress(psutil.NoSuchProcess):
            found.append(_use(prefix + role, psutil.Process(pid)))
    return found


def _use(role: str, process: psutil.Process) -> ProcessUse:
    return ProcessUse(role, process.pid, process.memory_info().rss, process.num_fds())
