"""The whole corpus, and a server to send it to.

`python -m tests.hostile.bad_inputs --mutations 3000 --seed 7` sends it out of CI and prints what is wrong.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Self

import grpc

from tests.e2e.harness import System, active_version
from tests.fakes.hash_model import oracle
from tests.hostile.bad_inputs import (
    adapter_calls,
    adapter_files,
    generation,
    lora_tasks,
    model,
    mutations,
    other_calls,
    pooling,
    pushes,
    residency,
    uploads,
    worker_port,
    workers,
)
from tests.hostile.bad_inputs.case import OK, Case, problems, send
from tests.hostile.bad_inputs.facts import WORKER_FLAGS, Facts, make_facts

GOOD_ADAPTER = "good"  # registered before anything is sent, and all that is registered afterwards
# What is sent to the port of clients, by the module of the cases.
CLIENT_TABLES: dict[str, Callable[[Facts], Iterator[Case]]] = {
    "generation": generation.cases,
    "model": model.cases,
    "pooling": pooling.cases,
    "adapter_calls": adapter_calls.cases,
    "residency": residency.cases,
    "workers": workers.cases,
    "uploads": uploads.cases,
    "lora_tasks": lora_tasks.cases,
    "pushes": pushes.cases,
    "adapter_files": adapter_files.cases,
    "other_calls": other_calls.cases,
}
KNOWN_TOKENS = 3


class Target:
    """A control plane with a hash worker, and the truth about one request. Use as a context manager."""

    def __init__(self, work_dir: Path, *, control_command: Sequence[str] = ("-m", "control_plane")) -> None:
        self.facts = make_facts(work_dir)
        self.system = System(
            self.facts.model_dir,
            work_dir / "system",
            control_flags=self.facts.control_flags,
            control_command=control_command,
        )
        self._stack = ExitStack()
        self.client_channel: grpc.Channel
        self.worker_channel: grpc.Channel

    def __enter__(self) -> Self:
        self._stack.enter_context(self.system)
        self.system.start_hash_worker("w0", WORKER_FLAGS)
        self.client = self.system.client()
        good = self.client.adapters.register(GOOD_ADAPTER, self.facts.work_dir / "root" / "good")
        self.facts = replace(self.facts, good_digest=active_version(good).digest)
        self.client_channel = self._stack.enter_context(grpc.insecure_channel(self.system.address))
        self.worker_channel = self._stack.enter_context(grpc.insecure_channel(self.system.worker_address))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._stack.__exit__(kind, value, traceback)

    # Each yields once for every case: what is wrong with the response to it, and with the known request behind it.

    def client_cases(self, table: str) -> Iterator[list[str]]:
        """One table of the client port."""
        for case in CLIENT_TABLES[table](self.facts):
            yield self._found(case.name, problems(case, send(self.client_channel, case), secrets=self.facts.secrets))

    def worker_cases(self) -> Iterator[list[str]]:
        """Calls to the worker port."""
        for case in worker_port.cases(self.facts):
            yield self._found(case.name, problems(case, send(self.worker_channel, case), secrets=self.facts.secrets))

    def conversations(self) -> Iterator[list[str]]:
        """Plan streams."""
        for conversation in worker_port.conversations(self.facts):
            outcome = worker_port.converse(self.worker_channel, self.client_channel, conversation)
            yield self._found(conversation.name, worker_port.problems(conversation, outcome))

    def mutated(self, seed: int, count: int) -> Iterator[list[str]]:
        """Messages that were good before some bytes were changed."""
        for case in mutations.cases(self.facts, seed, count):
            yield self._found(case.name, mutations.problems(send(self.client_channel, case), self.facts.secrets))
        for adapter in list(self.client.adapters.list()):  # a changed bit can make a check a registration
            if adapter.id != GOOD_ADAPTER:
                self.client.adapters.delete(adapter.id)

    def everything(self, seed: int, num_mutations: int) -> Iterator[list[str]]:
        """All of these."""
        for table in CLIENT_TABLES:
            yield from self.client_cases(table)
        yield from self.worker_cases()
        yield from self.conversations()
        yield from self.mutated(seed, num_mutations)

    def known_problem(self, adapter: str = "", digest: str = "") -> str:
        """What is wrong with the response to a request whose tokens are known; empty if nothing is."""
        case = generation.taken({"stopping.max_tokens": KNOWN_TOKENS, "adapter": adapter}, "the known request")
        outcome = send(self.client_channel, case)
        if outcome.code is not OK:
            return f"{outcome.code.name}: {outcome.message}"
        tokens = [token for data in outcome.responses for token in generation.tokens_of(data)]
        due = oracle(self.facts.fingerprint, digest, generation.PROMPT, KNOWN_TOKENS)
        return "" if tokens == due else f"{tokens} where {due} are due"

    def rest_problems(self) -> list[str]:
        """What the corpus left behind: adapters, requests, workers, blocks."""
        client = self.client
        status = client.status()
        names = {adapter.id for adapter in client.adapters.list()} - {GOOD_ADAPTER}
        found = [f"adapter {name} is registered" for name in sorted(names)]
        found += [f"worker {worker.worker_id} is attached" for worker in status.workers if worker.worker_id != "w0"]
        found += [f"{worker.num_blocks_held} blocks are held" for worker in status.workers if worker.num_blocks_held]
        if known := self.known_problem(GOOD_ADAPTER, self.facts.good_digest):
            found.append(f"the known request for the good adapter: {known}")
        if status.queues.num_requests:
            found.append(f"{status.queues.num_requests} requests are not finished")
        uploads_dir = self.system.data_dir / "uploads"
        return found + [f"{path.name} is left of an upload" for path in uploads_dir.iterdir()]

    def _found(self, name: str, found: Sequence[str]) -> list[str]:
        known = self.known_problem()
        return [
            f"{name}: {problem}" for problem in [*found, *([f"the known request afterwards: {known}"] if known else [])]
        ]
