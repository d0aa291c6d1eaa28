"""The production ingest, scheduler, wire and engine in one process: no network, no time, everything repeatable."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from contract.v1 import plan_pb2
from control_plane.constraints.sent import SentConstraints
from control_plane.fleet.workers.reports import check_targets, report_of
from control_plane.fleet.workers.wire import PlanEncoder, limits_of
from control_plane.registry.adapter_files import ALL_NAMES
from control_plane.registry.model.base_model import BaseModel
from control_plane.registry.model.served_modules import NOTHING_REPORTED, Modules
from control_plane.registry.peft.ingest import PackedInfo
from control_plane.scheduler.invariants import check_scheduler
from control_plane.scheduler.scheduler import Scheduler
from control_plane.scheduler.settings import SchedulerSettings
from control_plane.scheduler.stats import SchedulerStats
from control_plane.scheduler.types import (
    AdapterRef,
    FinishReason,
    LoadSlot,
    Request,
    RequestOutput,
    SlotCommand,
    SlotEmptied,
    SlotReady,
    StepPlan,
    TokenLogprobs,
    Vector,
)
from data_plane.engine.engine import TorchEngine
from data_plane.plan import Engine
from data_plane.stream.constraints import SessionConstraints
from data_plane.wire import decode_steps, encode_hello, encode_output
from tests.control_plane.registry.rig import pack


@dataclass(frozen=True)
class IngestedAdapter:
    """One adapter as the registry packs it, and an AdapterSource that knows it alone."""

    info: PackedInfo
    chunks: list[bytes]

    @property
    def ref(self) -> AdapterRef:
        """The adapter as requests name it."""
        return AdapterRef(self.info.digest, self.info.arena_bytes, self.info.context_length, self.info.num_tokens)

    def open(self, digest: str) -> tuple[bytes, Iterator[bytes]]:
        assert digest == self.info.digest, f"{digest} is requested, and only {self.info.digest} is here"
        return self.info.manifest, iter(self.chunks)


def ingested(directory: Path, base_model: BaseModel, reported: Modules = NOTHING_REPORTED) -> IngestedAdapter:
    """What the registry makes of a directory. `reported` is what workers report of the model."""
    files = {name: directory / name for name in ALL_NAMES if (directory / name).exists()}
    return IngestedAdapter(*pack(files, base_model, max_adapter_bytes=1 << 30, reported=reported))


def reported_by(engine: TorchEngine) -> Modules:
    """What the control plane learns from the engine's Hello."""
    hello = encode_hello(engine.capacities, "worker").hello
    assert not check_targets(hello)
    return report_of(hello).modules


@dataclass
class Served:
    """What one index of a request got."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    score: float | None = None
    finish_reason: FinishReason | None = None
    pooled: Vector | None = None


Completions = dict[tuple[int, int], Served]  # by request and index


def serve(
    engine: Engine,
    requests: Sequence[Request],
    adapters: Sequence[IngestedAdapter],
    settings: SchedulerSettings,
    *,
    plan_depth: int = 2,
    max_steps: int = 1,
    num_host_blocks: int = 0,
    on_plan: Callable[[StepPlan], None] = lambda plan: None,
    then: Sequence[Sequence[Request]] = (),
) -> tuple[Completions, SchedulerStats]:
    """Run all requests from an empty engine; results come back when nothing more can be planned.

    `then`: waves of further requests; each comes when all before have ended.
    """
    engine.reset()
    hello = encode_hello(replace(engine.capacities, num_host_blocks=num_host_blocks), "worker").hello
    scheduler = Scheduler(limits_of(hello, plan_depth), settings)
    encoder = PlanEncoder(1, engine.capacities.vocab_size, engine.capacities.hidden_width)
    sent, session = SentConstraints(), SessionConstraints()
    source_of = {adapter.info.digest: adapter for adapter in adapters}
    for request in requests:
        scheduler.add(request)
    results: deque[plan_pb2.StepResult] = deque()
    completions: Completions = {}
    for _ in range(10_000):
        if not scheduler.request_ids and not results:
            if not then:
                break
            for request in then[0]:
                scheduler.add(request)
            then = then[1:]
        commands = list(scheduler.slot_commands())
        for command in commands:
            _obey(engine, scheduler, command, source_of)
        plan = scheduler.plan(0.0, max_steps)
        if plan is not None:
            on_plan(plan)
            for message in sent.messages_for(plan.new_rows):
                if message.HasField("put_vocabulary"):
                    session.put_vocabulary(message.put_vocabulary)
                else:
                    session.put_grammar(message.put_grammar)
            for step in decode_steps(encoder.encode(plan).step_plan, session.of):
                results.append(encode_output(engine.execute(step), 1).step_result)
            continue
        if commands and not results:
            continue  # a slot was emptied, for another adapter
        assert results, "nothing is planned and nothing is under way"
        result = encoder.decode_result(results.popleft())
        assert result is not None
        for output in scheduler.apply(result):
            _record(completions.setdefault((output.request_id, output.index), Served()), output)
        check_scheduler(scheduler)
    assert not scheduler.request_ids, "not done after 10 000 turns"
    stats = scheduler.stats()
    assert (stats.num_host_blocks_held, stats.num_blocks_held) == (0, 0)
    return completions, stats


def _obey(engine: Engine, scheduler: Scheduler, command: SlotCommand, source_of: dict[str, IngestedAdapter]) -> None:
    if isinstance(command, LoadSlot):
        engine.slots.load(command.slot_idx, command.generation, command.digest, source_of[command.digest])
        scheduler.apply_slot_report(SlotReady(command.slot_idx, command.generation), 0.0)
    else:
        engine.slots.evict(command.slot_idx, command.generation)
        scheduler.apply_slot_report(SlotEmptied(command.slot_idx, command.generation), 0.0)


def _record(served: Served, output: RequestOutput) -> None:
    assert served.finish_reason is None, "a completion has output after its end"
    served.token_ids += output.token_ids
    served.logprobs += output.logprobs or []
    served.score, served.finish_reason = output.score, output.finish_reason
    served.pooled = output.pooled
