"""A system of two workers whose arenas hold four of many adapters; requests, changes and faults at random."""

from __future__ import annotations

import random
import signal
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Self

from motet import (
    AdapterTier,
    AdapterUse,
    Client,
    DeadlineExceeded,
    FailedPrecondition,
    NotFound,
    ResourceExhausted,
    Unavailable,
)
from safetensors.numpy import load_file

from tests.e2e.harness import System, active_version, wait_until
from tests.hostile.churn.ledger import Ledger, Name
from tests.hostile.churn.truth import KINDS, NUM_TOKENS, Combined, Version, combine, complete, make_version
from tests.makers import make_checkpoint, make_prompt, make_tokenizer

ARENA_ADAPTERS = 4
NUM_STABLE = 4  # of plain LoRA, which combinations use: they stay as they are
WORKER_FLAGS = ["--dtype", "float32", "--block-size", "4", "--num-blocks", "72", "--max-rows", "12"]
WORKER_FLAGS += ["--max-model-len", "96", "--num-slots", "6", "--host-kv-bytes", "2MiB", "--token-budget", "24"]
CONTROL_FLAGS = ["--swap-us-per-block", "0.1", "--dtype", "float32"]
TIMEOUT_S = 120.0
VECTOR_TOLERANCE = 1e-4  # of values of vectors of length 1: sums of another order
FAULT_PAUSE_S = 10.0
STREAM_THREADS, CHANGE_THREADS = 6, 2


class World:
    """A context manager. `run` may be called again and again."""

    def __init__(self, work_dir: Path, *, seed: int, num_adapters: int, num_versions: int = 2) -> None:
        """`num_versions`: of each name, at most, each with weights of its own."""
        self.model_dir = make_tokenizer(make_checkpoint(work_dir / "model", arch="llama"))
        self._work_dir = work_dir
        self._seed = seed
        self._base = complete(self.model_dir, None, "", seed)
        kinds = list(KINDS)
        self.versions: dict[str, list[Version]] = {}
        for number in range(num_adapters):
            kind = "lora" if number < NUM_STABLE else kinds[number % len(kinds)]
            self.versions[f"churn-{number}"] = [
                make_version(work_dir / f"a{number}v{index}", self.model_dir, kind, seed + 100 * number + index)
                for index in range(1 if number < NUM_STABLE else num_versions)
            ]
        self.ledger = Ledger(list(self.versions))
        self._by_digest: dict[str, Version] = {}
        self._first: dict[
            tuple[str, tuple[int, ...], int], tuple[int, ...]
        ] = {}  # samples, by version, prompt and seed
        self._vectors: dict[tuple[str, tuple[int, ...]], tuple[float, ...]] = {}  # by version and prompt
        self._combined: list[Combined] = []
        self._stack = ExitStack()
        self.client: Client
        self.system: System

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            self.system = stack.enter_context(System(self.model_dir, self._work_dir, control_flags=CONTROL_FLAGS))
            self.client = self.system.client()
            sizes = []
            for name, versions in self.versions.items():
                for version in reversed(versions):
                    registered = active_version(self.client.adapters.register(name, version.directory))
                    version.digest = registered.digest
                    self._by_digest[registered.digest] = version
                    self.ledger.names[name].digests.add(registered.digest)
                    sizes.append(registered.size_bytes)
                self.ledger.names[name].active = versions[0].digest
            stable = [versions[0] for versions in list(self.versions.values())[:NUM_STABLE]]
            self._combined = combine(self.model_dir, stable, self._seed)
            self._arena_bytes = ARENA_ADAPTERS * max(sizes)
            for worker_id in ("w0", "w1"):
                self._start_worker(worker_id)
            wait_until(lambda: len(self.client.status().workers) == 2, "both workers are attached", TIMEOUT_S)
            self._stack = stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._stack.__exit__(kind, value, traceback)

    def _start_worker(self, worker_id: str) -> None:
        flags = [*WORKER_FLAGS, "--arena-bytes", str(self._arena_bytes)]
        self.system.start_worker(worker_id, flags, wait=False)

    # ---- the run ----

    def run(self, seconds: float, *, with_faults: bool = True, pace_s: float = 0.05) -> None:
        """Everything at once for so long. `pace_s`: mean pause between two changes of one thread."""
        end_s = time.monotonic() + seconds
        draw = random.Random(self._seed)
        # What each thread does, and its mean pause in seconds.
        tasks: list[tuple[Callable[[random.Random], None], float]] = [(self._stream, 0.0)] * STREAM_THREADS
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
            known = self._by_digest[entry.active].known[0] if entry.active else self._base[0]
            try:
                stream = self.client.generate(
                    known.prompt, adapter=name, max_tokens=NUM_TOKENS, ignore_eos=True, timeout_s=TIMEOUT_S
                )
                found = stream.result()
            except NotFound:
                self.ledger.check_missing(view)
                continue
            self.ledger.check_version(view, found.started.adapter_digest)
            self.ledger.check_tokens(f"{name} at rest", list(found.token_ids), known.token_ids)

    # ---- requests ----

    def _stream(self, draw: random.Random) -> None:
        """One request: of a name, of the base, or of a combination."""
        chance = draw.random()
        try:
            if chance < 0.1:
                self._request_base(draw)
            elif chance < 0.25:
                self._request_combined(draw)
            elif chance < 0.35:
                self._request_sampled(draw)
            elif chance < 0.4:
                self._request_vector(draw)
            else:
                self._request_name(draw)
        except (Unavailable, ResourceExhausted, DeadlineExceeded, FailedPrecondition) as error:
            self.ledger.count(f"refused: {type(error).__name__}")

    def _request_base(self, draw: random.Random) -> None:
        known = draw.choice(self._base)
        found = self.client.generate(known.prompt, max_tokens=NUM_TOKENS, ignore_eos=True, timeout_s=TIMEOUT_S).result()
        self.ledger.check_tokens("base", list(found.token_ids), known.token_ids)

    def _request_combined(self, draw: random.Random) -> None:
        chosen = draw.choice(self._combined)
        names = {versions[0].digest: name for name, versions in self.versions.items()}
        uses = [AdapterUse(names[digest], scale, digest) for digest, scale in chosen.scales.items()]
        found = self.client.generate(
            chosen.known.prompt,
            adapters=uses,
            combination="linear" if chosen.combination == "linear" else None,
            max_tokens=NUM_TOKENS,
            ignore_eos=True,
            timeout_s=TIMEOUT_S,
        ).result()
        self.ledger.check_tokens(f"combination of {len(uses)}", list(found.token_ids), chosen.known.token_ids)

    def _request_sampled(self, draw: random.Random) -> None:
        """A version's tokens by a seed are those of the first time, whatever happened meanwhile."""
        name = draw.choice(list(self.versions))
        version, seed = self.versions[name][0], draw.randrange(3)
        view = self.ledger.look(name)
        try:
            found = self.client.generate(
                version.known[0].prompt,
                adapter=name,
                temperature=1.3,
                seed=seed,
                max_tokens=NUM_TOKENS,
                ignore_eos=True,
                timeout_s=TIMEOUT_S,
            ).result()
        except NotFound:
            self.ledger.check_missing(view)
            return
        digest = found.started.adapter_digest
        self.ledger.check_version(view, digest)
        first = self._first.setdefault((digest, version.known[0].prompt, seed), found.token_ids)
        self.ledger.check_tokens(f"{name}, sampled", list(found.token_ids), first)

    def _request_vector(self, draw: random.Random) -> None:
        """The embedding of a prompt is that of the first time, up to rounding."""
        name = draw.choice([name for name, versions in self.versions.items() if versions[0].kind != "activated"])
        prompt = make_prompt(draw.randrange(3), 12)
        view = self.ledger.look(name)
        try:
            found = self.client.embed(prompt, adapter=name, timeout_s=TIMEOUT_S)
        except NotFound:
            self.ledger.check_missing(view)
            return
        self.ledger.check_version(view, found.adapter_digest)
        values = found.embeddings[0].values
        first = self._vectors.setdefault((found.adapter_digest, tuple(prompt)), values)
        self.ledger.count("vectors")
        if max(abs(one - other) for one, other in zip(values, first, strict=True)) > VECTOR_TOLERANCE:
            self.ledger.blame(f"{name}: another embedding than before")

    def _request_name(self, draw: random.Random) -> None:
        """The prompt is one of the version that is likely to be active; another version's tokens are not known."""
        name = draw.choice(list(self.versions))
        view = self.ledger.look(name)
        expected = self._by_digest.get(view.active) or self.versions[name][0]
        known = draw.choice(expected.known)
        num_cancelled = draw.randrange(1, NUM_TOKENS) if draw.random() < 0.1 else 0
        pinned = view.active if draw.random() < 0.2 else ""
        stream = self.client.generate(
            known.prompt,
            adapter=name,
            adapter_digest=pinned,
            max_tokens=NUM_TOKENS,
            ignore_eos=True,
            timeout_s=TIMEOUT_S,
        )
        try:
            token_ids, digest = list[int](), ""
            for chunk in stream:
                token_ids += chunk.token_ids
                digest = chunk.adapter_digest
                if num_cancelled and len(token_ids) >= num_cancelled:
                    break
        except NotFound:
            self.ledger.check_missing(view)
            return
        finally:
            stream.close()
        if pinned and digest != pinned:
            self.ledger.blame(f"{name}: version {digest[:12]} where {pinned[:12]} is pinned")
        self.ledger.check_version(view, digest)
        if digest == expected.digest:
            due: Sequence[int] = known.token_ids
            if num_cancelled and len(token_ids) < NUM_TOKENS:
                due = due[: len(token_ids)]
            self.ledger.check_tokens(f"{name}, {expected.kind}", token_ids, tuple(due))
        else:
            self.ledger.count("streams of a version that changed")

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
        entry.active = active_version(self.client.adapters.register(name, version.directory)).digest
        self._check_digest(name, version, entry.active)

    def _push(self, draw: random.Random, name: str, entry: Name) -> None:
        version = draw.choice(self.versions[name])
        config = (version.directory / "adapter_config.json").read_bytes()
        tensors = load_file(version.directory / "adapter_model.safetensors")
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
