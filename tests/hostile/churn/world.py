"""A system of two workers whose arenas hold four of many adapters; requests, changes and faults at random."""

from __future__ import annotations

import random
import signal
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Self

from motet import AdapterTier, Client, DeadlineExceeded, FailedPrecondition, NotFound, ResourceExhausted, Unavailable
from safetensors.torch import load_file

from tests.adapter_kinds import CONFIG, SIZES, WEIGHTS, kinds_of
from tests.e2e.harness import System, active_version, wait_until
from tests.hostile.churn.ledger import Ledger, Name
from tests.hostile.churn.requests import TIMEOUT_S, Requests
from tests.hostile.churn.truth import BASE, NUM_TOKENS, Version, combine, complete, make_version
from tests.makers import make_checkpoint, make_tokenizer

ARENA_ADAPTERS = 4
NUM_STABLE = 4  # of plain LoRA, which combinations use: they stay as they are
WORKER_FLAGS = ["--dtype", "float32", "--block-size", "4", "--num-blocks", "72", "--max-rows", "12"]
WORKER_FLAGS += ["--max-model-len", "96", "--max-adapter-model-len", "160", "--num-slots", "6"]
WORKER_FLAGS += ["--host-kv-bytes", "2MiB", "--token-budget", "24"]
CONTROL_FLAGS = ["--swap-us-per-block", "0.1", "--dtype", "float32"]
TASK_ADAPTERS = 3  # that the cache of task ids has room for
FAULT_PAUSE_S = 10.0
STREAM_THREADS, CHANGE_THREADS = 6, 2


class World:
    """A context manager. `run` may be called again and again."""

    def __init__(
        self, work_dir: Path, *, seed: int, num_adapters: int, num_versions: int = 2, arch: str = "llama"
    ) -> None:
        """`num_versions`: of each name, at most, each with weights of its own."""
        self.model_dir = make_tokenizer(make_checkpoint(work_dir / "model", arch=arch, **SIZES[arch]))
        self._work_dir = work_dir
        self._seed = seed
        kinds = kinds_of(arch)
        names = list(kinds)
        self.versions: dict[str, list[Version]] = {}
        for number in range(num_adapters):
            kind = names[0] if number < NUM_STABLE else names[number % len(names)]
            self.versions[f"churn-{number}"] = [
                make_version(
                    work_dir / f"a{number}v{index}", self.model_dir, kind, kinds[kind], seed + 100 * number + index
                )
                for index in range(1 if number < NUM_STABLE else num_versions)
            ]
        self.ledger = Ledger(list(self.versions))
        self._by_digest: dict[str, Version] = {}
        self._stack = ExitStack()
        self.client: Client
        self.system: System
        self.requests: Requests

    def __enter__(self) -> Self:
        base = complete(self.model_dir, None, BASE, self._seed)
        largest = max(size_of(version) for versions in self.versions.values() for version in versions)
        self._arena_bytes = ARENA_ADAPTERS * largest
        flags = [*CONTROL_FLAGS, "--task-cache-bytes", str(TASK_ADAPTERS * largest)]
        with ExitStack() as stack:
            self.system = stack.enter_context(System(self.model_dir, self._work_dir, control_flags=flags))
            self.client = self.system.client()
            # Only a worker knows how a mixture computes its experts: registration follows what it reports.
            self._start_worker("w0", wait=True)
            self._start_worker("w1")
            with ThreadPoolExecutor(2) as pool:
                list(pool.map(self._register_first, self.versions))
            stable = [versions[0] for versions in list(self.versions.values())[:NUM_STABLE]]
            combined = combine(self.model_dir, stable, self._seed)
            self.requests = Requests(self.client, self.ledger, self.versions, base, combined)
            wait_until(lambda: len(self.client.status().workers) == 2, "both workers are attached", TIMEOUT_S)
            self._stack = stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._stack.__exit__(kind, value, traceback)

    def _register_first(self, name: str) -> None:
        """All versions of a name. The first one is active at the end."""
        entry, versions = self.ledger.names[name], self.versions[name]
        for version in reversed(versions):
            version.digest = active_version(self.client.adapters.register(name, version.made.served)).digest
            self._by_digest[version.digest] = version
            entry.digests.add(version.digest)
        entry.active = versions[0].digest

    def _start_worker(self, worker_id: str, *, wait: bool = False) -> None:
        flags = [*WORKER_FLAGS, "--arena-bytes", str(self._arena_bytes)]
        self.system.start_worker(worker_id, flags, wait=wait)

    # ---- the run ----

    def run(self, seconds: float, *, with_faults: bool = True, pace_s: float = 0.05) -> None:
        """Everything at once for so long. `pace_s`: mean pause between two changes of one thread."""
        end_s = time.monotonic() + seconds
        draw = random.Random(self._seed)
        # What each thread does, and its mean pause in seconds.
        tasks: list[tuple[Callable[[random.Random], None], float]] = [(self.requests.send, 0.0)] * STREAM_THREADS
        tasks += [(self._change, pace_s)] * CHANGE_THREADS
        if with_faults:
            tasks.append((self._fault, FAULT_PAUSE_S))
        over = threading.Event()

        def repeat(task: Callable[[random.Random], None], pause_s: float, own: random.Random) -> None:
            while time.monotonic() < end_s and not over.is_set():
                try:
                    task(own)
                except Exception as error:  # a thread that ends in silence would look like a quiet run
                    self.ledger.blame(f"{getattr(task, '__name__', task)}: {type(error).__name__}: {error}")
                over.wait(own.expovariate(1 / pause_s) if pause_s else 0.0)

        threads = [
            threading.Thread(target=repeat, args=(*task, random.Random(draw.randrange(1 << 62))), daemon=True)
            for task in tasks
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def check_rest(self) -> None:
        """At the end: every name is what the ledger says, and generates as itself."""
        for name, entry in self.ledger.names.items():
            view = self.ledger.look(name)
            known = (self._by_digest[entry.active] if entry.active else self.versions[name][0]).known[0]
            try:
                stream = self.client.generate(
                    known.sent, adapter=name, max_tokens=NUM_TOKENS, ignore_eos=True, timeout_s=TIMEOUT_S
                )
                found = stream.result()
            except NotFound:
                self.ledger.check_missing(view)
                continue
            self.ledger.check_version(view, found.started.adapter_digest)
            self.ledger.check_tokens(f"{name} at rest", list(found.token_ids), known.token_ids)

    # ---- changes ----

    def _change(self, draw: random.Random) -> None:
        """One change of one name, by one of the ways that there are."""
        name = draw.choice(list(self.versions)[NUM_STABLE:])
        change = draw.choice([self._register, self._push, self._activate, self._delete, self._move, self._pin])
        with self.ledger.change(name) as entry:
            try:
                change(draw, name, entry)
                self.ledger.count(getattr(change, "__name__", "change").strip("_"))
            except (Unavailable, ResourceExhausted, DeadlineExceeded, FailedPrecondition) as error:
                self.ledger.count(f"change refused: {type(error).__name__}")
                self._find_out(name, entry)

    def _register(self, draw: random.Random, name: str, entry: Name) -> None:
        version = draw.choice(self.versions[name])
        entry.active = active_version(self.client.adapters.register(name, version.made.served)).digest
        self._check_digest(name, version, entry.active)

    def _push(self, draw: random.Random, name: str, entry: Name) -> None:
        version = draw.choice(self.versions[name])
        if (pushed_dir := version.made.pushed) is None:
            return
        config = (pushed_dir / CONFIG).read_bytes()
        tensors = load_file(pushed_dir / WEIGHTS)
        pushed = self.client.adapters.push(name, config, tensors)
        entry.active = active_version(pushed.adapter).digest
        self._check_digest(name, version, entry.active)

    def _activate(self, draw: random.Random, name: str, entry: Name) -> None:
        if not entry.active:
            return
        present = sorted(version.digest for version in self.client.adapters.versions(name))
        digest = draw.choice(present)
        self.client.adapters.activate(name, digest)
        entry.active = digest

    def _delete(self, draw: random.Random, name: str, entry: Name) -> None:
        if not entry.active:
            return
        if draw.random() < 0.5:
            others = [each.digest for each in self.client.adapters.versions(name) if each.digest != entry.active]
            for digest in others[:1]:
                self.client.adapters.delete_version(name, digest)
            return
        self.client.adapters.delete(name)
        entry.active = ""

    def _move(self, draw: random.Random, name: str, entry: Name) -> None:
        """To the arena, or out of it or of the host cache."""
        if not entry.active:
            return
        tier = draw.choice((AdapterTier.HOST_CACHE, AdapterTier.ARENA))
        if draw.random() < 0.5:
            self.client.adapters.load(name, tier=tier)
        else:
            self.client.adapters.unload(name, tier=tier)

    def _pin(self, draw: random.Random, name: str, entry: Name) -> None:
        """For a moment: pins hold slots."""
        if entry.active:
            self.client.adapters.pin(name)
            self.client.adapters.unpin(name)

    def _find_out(self, name: str, entry: Name) -> None:
        """What a refused change left: it may have happened."""
        for _ in range(100):
            try:
                entry.active = active_version(self.client.adapters.get(name)).digest
                return
            except NotFound:
                entry.active = ""
                return
            except (Unavailable, DeadlineExceeded, ResourceExhausted):
                continue
        self.ledger.blame(f"{name}: the server does not say what became of it")

    def _check_digest(self, name: str, version: Version, digest: str) -> None:
        if digest != version.digest:
            self.ledger.blame(f"{name}: the same files have the digest {digest[:12]}, not {version.digest[:12]}")

    # ---- faults ----

    def _fault(self, draw: random.Random) -> None:
        """A worker dies and is started again, or stands still for a while; or Redis forgets everything."""
        worker_id = draw.choice(("w0", "w1"))
        kind = draw.choice(("kill", "stop", "redis"))
        self.ledger.count(f"fault: {kind}")
        if kind == "kill":
            self._start_worker(worker_id)  # in place of the one that runs, which is killed
        elif kind == "stop":
            worker = self.system.workers[worker_id]
            worker.send(signal.SIGSTOP)
            threading.Event().wait(draw.uniform(0.1, 2.0))
            worker.send(signal.SIGCONT)
        else:
            self.system.redis_process().send_signal(signal.SIGKILL)


def size_of(version: Version) -> int:
    """Bytes of its largest file, which is what its weights take, or a little more."""
    return max(path.stat().st_size for path in version.made.served.iterdir())
