"""The event loop of the simulation: arrivals, step results, slot reports and failures in order of virtual time.

Placement, scheduling, admission, preemption and the number of steps that plans run ahead are the production code; this
file only moves time, compares every token with the one that is due, and writes down. What belongs to the fleet around
them is left out: the bound of the queue, quotas, rebalancing, the bound of migrations and isolation of suspects.
"""

from __future__ import annotations

import heapq
import itertools
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial

from benchmarks.control_plane.simulator.costs import Costs
from benchmarks.control_plane.simulator.worker import HostCache, SimulatedWorker, completion_key, token_at
from control_plane.fleet.placement import placement
from control_plane.fleet.placement.shortlist import Shortlist
from control_plane.fleet.settings import PlacementCosts
from control_plane.scheduler.scheduler import Scheduler
from control_plane.scheduler.types import (
    LoadSlot,
    Outputs,
    Request,
    RequestId,
    SlotCommand,
    SlotEmptied,
    SlotReady,
    sample_seed,
)

WINDOW_S = 1.0  # of the tenants' service


@dataclass(slots=True, frozen=True, kw_only=True)
class FleetShape:
    """The simulated machines."""

    num_workers: int
    failures_per_hour: float = 0.0  # of each worker
    restart_s: float = 30.0
    host_cache_bytes: int = 2 << 40


@dataclass(slots=True)
class LiveRequest:
    """What is known of a request before it ends."""

    request: Request
    worker: SimulatedWorker | None = None
    scheduled_s: float | None = None
    first_token_s: float | None = None
    num_output: list[int] = field(default_factory=list)  # tokens by completion
    num_ended: int = 0  # completions

    def __post_init__(self) -> None:
        self.num_output = [0] * self.request.num_samples


@dataclass(slots=True)
class Outcome:
    """Everything the reports need; times in seconds of virtual time, arrays by ended request in order of their end."""

    arrival_s: list[float] = field(default_factory=list)
    scheduled_s: list[float] = field(default_factory=list)
    first_token_s: list[float] = field(default_factory=list)
    end_s: list[float] = field(default_factory=list)
    num_prompt: list[int] = field(default_factory=list)
    num_output: list[int] = field(default_factory=list)  # of all its completions
    num_completions: list[int] = field(default_factory=list)
    tenant: list[str] = field(default_factory=list)
    # tenant -> window -> [prompt tokens begun, output tokens]
    service: dict[str, dict[int, list[int]]] = field(default_factory=dict)
    num_steps: int = 0
    num_loads: int = 0
    num_failures: int = 0
    num_migrations: int = 0
    num_preemptions: int = 0
    num_swapped_out: int = 0  # of them
    prefix_query_tokens: int = 0
    prefix_hit_tokens: int = 0
    host_cache_hits: int = 0
    host_cache_misses: int = 0
    busy_s: float = 0.0
    duration_s: float = 0.0


_Event = Callable[[], None]


class Simulation:
    """One run. `make_scheduler` gives each worker its scheduler."""

    def __init__(self, shape: FleetShape, costs: Costs, make_scheduler: Callable[[], Scheduler], seed: int) -> None:
        self.now_s = 0.0
        self.outcome = Outcome()
        self._shape = shape
        self._costs = costs
        self._make_scheduler = make_scheduler
        self._placement_costs = PlacementCosts()
        self._shortlist = Shortlist()
        self._rng = random.Random(seed)
        self._cache = HostCache(shape.host_cache_bytes)
        self._events: list[tuple[float, int, _Event]] = []
        self._serials = itertools.count()
        self._live: dict[RequestId, LiveRequest] = {}
        self._homeless: list[Request] = []  # no worker is up
        self._up: dict[str, SimulatedWorker] = {}
        self._arrivals: Iterator[Request] = iter(())
        self._is_over = False
        for idx in range(shape.num_workers):
            self._start(f"w{idx:05d}")

    def run(self, requests: Iterator[Request], *, until_s: float | None = None) -> Outcome:
        """Play the requests to their ends, or to a time."""
        self._arrivals = requests
        self._next_arrival()
        while self._events:
            when_s, _, event = heapq.heappop(self._events)
            if until_s is not None and when_s > until_s:
                break
            self.now_s = when_s
            event()
            if self._is_over and not self._live:
                break
        for worker in self._up.values():
            self._count(worker)
        self.outcome.host_cache_hits, self.outcome.host_cache_misses = self._cache.num_hits, self._cache.num_misses
        self.outcome.duration_s = self.now_s
        return self.outcome

    # ---- requests ----

    def _next_arrival(self) -> None:
        request = next(self._arrivals, None)
        if request is None:
            self._is_over = True
            return
        self._at(request.arrival_s, lambda: self._arrive(request))

    def _arrive(self, request: Request) -> None:
        self._live[request.request_id] = LiveRequest(request)
        self._assign(request)
        self._next_arrival()

    def _assign(self, request: Request) -> None:
        if not self._up:
            self._homeless.append(request)
            return
        need = placement.need_of(request, self._placement_costs, self._cache.__contains__)
        candidates = self._shortlist.choose(self._up, request)
        worker = next(placement.by_preference(candidates, need, self._placement_costs))
        self._shortlist.placed(request, worker.worker_id)
        self._live[request.request_id].worker = worker
        worker.scheduler.add(request)
        self._pump(worker)

    def _record(self, outputs: Outputs) -> None:
        now_s, live = self.now_s, self._live
        window = int(now_s / WINDOW_S)
        for output in outputs:
            record = live[output.request_id]
            tenant = self.outcome.service.setdefault(record.request.tenant, {})
            served = tenant.get(window)
            if served is None:
                served = tenant[window] = [0, 0]
            if record.first_token_s is None:
                record.first_token_s = now_s
                record.scheduled_s = output.first_scheduled_s
                served[0] += len(record.request.prompt_token_ids)
            request, index = record.request, output.index
            behind = len(request.prompt_token_ids) + record.num_output[index]
            key = completion_key(request.request_id, sample_seed(request.sampling.seed, index))
            for position, token_id in enumerate(output.token_ids, start=behind):
                assert token_id == token_at(key, position), f"{request.request_id}: not the token of completion {index}"
            record.num_output[index] += len(output.token_ids)
            served[1] += len(output.token_ids)
            if output.finish_reason is not None:
                record.num_ended += 1
                if record.num_ended == request.num_samples:
                    self._end(record)

    def _end(self, record: LiveRequest) -> None:
        request, outcome = record.request, self.outcome
        assert record.first_token_s is not None and record.scheduled_s is not None, f"{request.request_id} never ran"
        assert set(record.num_output) == {request.max_tokens}, f"request {request.request_id} ended too early"
        del self._live[request.request_id]
        outcome.arrival_s.append(request.arrival_s)
        outcome.scheduled_s.append(record.scheduled_s)
        outcome.first_token_s.append(record.first_token_s)
        outcome.end_s.append(self.now_s)
        outcome.num_prompt.append(len(request.prompt_token_ids))
        outcome.num_output.append(sum(record.num_output))
        outcome.num_completions.append(request.num_samples)
        outcome.tenant.append(request.tenant)

    # ---- workers ----

    def _start(self, worker_id: str) -> None:
        worker = SimulatedWorker(worker_id, self._make_scheduler(), self._costs, self._cache)
        self._up[worker_id] = worker
        if self._shape.failures_per_hour:
            life_s = self._rng.expovariate(self._shape.failures_per_hour / 3600)
            self._at(self.now_s + life_s, lambda: self._fail(worker))
        homeless, self._homeless = self._homeless, []
        for request in homeless:
            self._assign(request)

    def _fail(self, worker: SimulatedWorker) -> None:
        """The worker dies; its requests go on elsewhere with every token they have."""
        self._count(worker)
        worker.is_up = False
        del self._up[worker.worker_id]
        self.outcome.num_failures += 1
        self._at(self.now_s + self._shape.restart_s, lambda: self._start(worker.worker_id))
        for request in worker.scheduler.take_requests():
            self.outcome.num_migrations += 1
            self._assign(request)

    def _pump(self, worker: SimulatedWorker) -> None:
        """Everything that the worker's scheduler has to say by now."""
        scheduler, now_s = worker.scheduler, self.now_s
        self._send_commands(worker)
        while (plan := scheduler.plan(now_s, worker.max_steps)) is not None:
            self._send_commands(worker)
            for ends_s in worker.execute(plan, now_s):
                self._at(ends_s, lambda: self._return_result(worker))

    def _send_commands(self, worker: SimulatedWorker) -> None:
        for command in worker.scheduler.slot_commands():
            self.outcome.num_loads += isinstance(command, LoadSlot)
            self._at(self.now_s + worker.obey(command), partial(self._report, worker, command))

    def _return_result(self, worker: SimulatedWorker) -> None:
        if worker.is_up:
            outputs = worker.scheduler.apply(worker.take_result(self.now_s))
            self._pump(worker)
            self._record(outputs)

    def _report(self, worker: SimulatedWorker, command: SlotCommand) -> None:
        if worker.is_up:
            report = SlotReady if isinstance(command, LoadSlot) else SlotEmptied
            self._record(worker.scheduler.apply_slot_report(report(command.slot_idx, command.generation), self.now_s))
            self._pump(worker)

    def _count(self, worker: SimulatedWorker) -> None:
        stats = worker.scheduler.stats()
        self.outcome.num_preemptions += stats.num_preemptions
        self.outcome.num_swapped_out += stats.num_swapped_out
        self.outcome.prefix_query_tokens += stats.prefix_query_tokens
        self.outcome.prefix_hit_tokens += stats.prefix_hit_tokens
        self.outcome.num_steps += worker.num_steps
        self.outcome.busy_s += worker.busy_s

    def _at(self, when_s: float, event: _Event) -> None:
        heapq.heappush(self._events, (when_s, next(self._serials), event))
