"""Short makers for scheduler tests."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import Any

from control_plane.scheduler.fairness import VirtualCounters
from control_plane.scheduler.invariants import check_scheduler
from control_plane.scheduler.probe import SchedulerProbe
from control_plane.scheduler.scheduler import Scheduler
from control_plane.scheduler.settings import DEFAULT_SETTINGS, SchedulerSettings
from control_plane.scheduler.types import (
    AdapterRef,
    LoadSlot,
    Request,
    RequestId,
    RequestOutput,
    SlotCommand,
    SlotEmptied,
    SlotReady,
    StepPlan,
    WorkerLimits,
)
from tests.fakes.model_worker import ModelWorker, steps_of


def make_limits(**changes: Any) -> WorkerLimits:
    """A small worker: 16 blocks of 4 tokens, 4 rows, 32 tokens a step, 2 slots of 100 bytes in all."""
    values: dict[str, Any] = {
        "num_blocks": 16,
        "block_size": 4,
        "max_rows": 4,
        "max_step_tokens": 32,
        "num_slots": 2,
        "arena_bytes": 100,
        "max_model_len": 64,
        "plan_depth": 1,
    }
    return WorkerLimits(**(values | changes))


def make_adapter(name: str, arena_bytes: int = 50) -> AdapterRef:
    """An adapter with a digest made from its name."""
    return AdapterRef(hashlib.sha256(name.encode()).hexdigest(), arena_bytes)


def make_request(request_id: int, prompt: list[int] | int = 4, max_tokens: int = 4, **changes: Any) -> Request:
    """A request; an int as prompt is a length, the tokens then are the request's own. Arrives in order of ids."""
    tokens = [request_id] * prompt if isinstance(prompt, int) else prompt
    changes.setdefault("arrival_s", float(request_id))
    return Request(RequestId(request_id), tuple(tokens), max_tokens, **changes)


class Bench:
    """A scheduler joined to a model worker, moved by hand; keeps the outputs."""

    def __init__(
        self, settings: SchedulerSettings = DEFAULT_SETTINGS, counters: VirtualCounters | None = None, **limits: Any
    ) -> None:
        self.limits = make_limits(**limits)
        self.counters = VirtualCounters() if counters is None else counters
        self.scheduler = Scheduler(self.limits, settings, self.counters)
        self.probe = SchedulerProbe(self.scheduler)
        self.worker = ModelWorker(self.limits)
        self.sent: list[StepPlan] = []  # steps in flight, each as a plan of its own
        self.plans: list[StepPlan] = []
        self.tokens: dict[int, list[int]] = {}
        self.ends: dict[int, RequestOutput] = {}
        self.commands: list[SlotCommand] = []

    def add(self, *requests: Request) -> None:
        """Queue requests."""
        for request in requests:
            self.scheduler.add(request)
            self.tokens[request.request_id] = list(request.generated_token_ids)

    def plan(self, now_s: float = 0.0, max_steps: int = 1) -> StepPlan | None:
        """Make one plan and keep its steps for `return_result`."""
        plan = self.scheduler.plan(now_s, max_steps)
        if plan is not None:
            self.sent.extend(steps_of(plan))
            self.plans.append(plan)
        check_scheduler(self.scheduler)
        return plan

    def return_result(self) -> list[RequestOutput]:
        """Execute the oldest step and return its result."""
        outputs = list(self.scheduler.apply(self.worker.execute(self.sent.pop(0))))
        self.keep(outputs)
        check_scheduler(self.scheduler)
        return outputs

    def keep(self, outputs: Iterable[RequestOutput]) -> None:
        """Record outputs by request."""
        for output in outputs:
            assert output.request_id not in self.ends, "output after the end"
            self.tokens[output.request_id] += output.token_ids
            if output.finish_reason is not None:
                self.ends[output.request_id] = output

    def obey(self) -> list[SlotCommand]:
        """Carry out slot commands until none is left; returns them."""
        done: list[SlotCommand] = []
        while commands := self.scheduler.slot_commands():
            for command in commands:
                self.worker.obey(command)
                report = SlotReady if isinstance(command, LoadSlot) else SlotEmptied
                self.keep(self.scheduler.apply_slot_report(report(command.slot_idx, command.generation), 0.0))
            done += commands
        check_scheduler(self.scheduler)
        return done

    def step(self) -> StepPlan | None:
        """Slots, one plan, its result."""
        self.obey()
        plan = self.plan()
        if self.sent:
            self.return_result()
        return plan

    def run(self, max_steps: int = 500) -> None:
        """Until everything ended."""
        for _ in range(max_steps):
            if len(self.scheduler.request_ids) == 0 and not self.sent:
                return
            self.step()
        raise AssertionError(f"{len(self.scheduler.request_ids)} requests did not end in {max_steps} steps")

    def run_until_idle(self) -> None:
        """Until there is nothing to compute and to load."""
        while self.obey() or self.plan() is not None or self.sent:
            if self.sent:
                self.return_result()

    def running_ids(self) -> list[int]:
        """Requests that hold a row, in order of arrival."""
        return list(self.probe.running_ids())
