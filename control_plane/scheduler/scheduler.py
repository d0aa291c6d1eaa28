"""The scheduler of one worker: requests and results in, plans and slot commands out.

Pure and deterministic: no I/O, and the time is an argument. The fleet calls it from one task. The planner decides what
a step contains. Plans may be made ahead of results.

A request that leaves (ended, cancelled, preempted) keeps its rows, blocks and slot until the results of all in-flight
steps that name it have come. So nothing that a worker may still touch is given away. There is one exception: blocks
that a plan moves to host memory are free for that plan already. A plan may consist of such moves alone.
"""

from __future__ import annotations

from collections import deque
from collections.abc import KeysView, Reversible, Set
from dataclasses import dataclass
from operator import attrgetter

from contract.plan_stream.plan_bounds import MAX_PLAN_STEPS
from control_plane.scheduler.admission import check_fits, make_group
from control_plane.scheduler.errors import RequestNeverFits
from control_plane.scheduler.fairness import VirtualCounters
from control_plane.scheduler.memory.prefix_cache import PrefixKeys as PrefixKeys
from control_plane.scheduler.memory.preloads import Preloads
from control_plane.scheduler.queues.deadlines import Deadlines
from control_plane.scheduler.requests.states import GroupState
from control_plane.scheduler.settings import DEFAULT_SETTINGS, SchedulerSettings
from control_plane.scheduler.stats import (
    AdapterUse as AdapterUse,
    SchedulerStats as SchedulerStats,
    WorkerUtilization as WorkerUtilization,
    scheduler_stats,
)
from control_plane.scheduler.step.plan_draft import InFlightStep, PlanDraft, check_result, note_logprobs
from control_plane.scheduler.step.planner import Planner
from control_plane.scheduler.step.preemption import choose_paused
from control_plane.scheduler.step.run_ahead import may_plan, repeat
from control_plane.scheduler.step.step_results import StepResults, ending
from control_plane.scheduler.step.worker_state import WorkerState, make_worker_state
from control_plane.scheduler.types import (
    FinishReason,
    Outputs,
    Request,
    RequestId,
    RequestOutput,
    SlotCommand,
    SlotEmptied,
    SlotReady,
    SlotReport,
    StepPlan,
    StepResult,
    WorkerLimits,
    has_adapter,
)


@dataclass(frozen=True)
class SchedulerParts:
    """The parts of a scheduler, for probe.py and invariants.py alone."""

    worker: WorkerState
    counters: VirtualCounters
    in_flight: deque[InFlightStep]


def scheduler_parts(scheduler: Scheduler) -> SchedulerParts:
    """Look into a scheduler. No part of a server calls this function; tests/test_layout.py checks it."""
    return SchedulerParts(scheduler._worker, scheduler._counters, scheduler._in_flight)


class Scheduler:
    """Decides what one worker computes."""

    def __init__(
        self,
        limits: WorkerLimits,
        settings: SchedulerSettings = DEFAULT_SETTINGS,
        counters: VirtualCounters | None = None,
    ) -> None:
        """`counters` are the tenants' accounts, one object for all schedulers of a process; None: its own."""
        self.limits = limits = settings.bound(limits)
        self.settings = settings
        self._counters = VirtualCounters() if counters is None else counters
        self._worker = worker = make_worker_state(limits, settings, self._counters)
        self._groups = worker.lifecycle.groups
        # Live requests, and of these the ones that wait for their first row here: views, in order of arrival.
        self.request_ids: KeysView[RequestId] = worker.lifecycle.groups.keys()
        self.unstarted_ids: Reversible[RequestId] = worker.queues.unstarted.keys()
        self._in_flight: deque[InFlightStep] = deque()  # steps whose results have not come, oldest first
        self._planner = Planner(worker, settings)
        self._results = StepResults(worker)
        self.preloads = Preloads(worker.demands, worker.slots, worker.purge, limits.arena_bytes)
        self._deadlines = Deadlines()
        self._outputs = Outputs()  # not returned yet
        self._next_step_id = 1
        self._next_serial = 0
        self._is_dead = False

    # ---- requests ----

    def add(self, request: Request) -> None:
        """Queue a request; its adapter is demanded at once.

        Raises RequestNeverFits (or its subclasses for context and adapter) if it could not run here even alone.
        """
        assert not self._is_dead, "a request is added to a scheduler whose requests were taken away"
        assert request.request_id not in self._groups, f"request {request.request_id} is added twice"
        group = make_group(request, self.limits, self._next_serial)
        self._next_serial += 1
        self._worker.lifecycle.add(group)
        if request.deadline_s is not None:
            self._deadlines.add(request.deadline_s, request.request_id)
            if len(self._deadlines) > 64 + 2 * len(self._groups):
                self._deadlines.keep_only(set(self._groups))

    def refusal(self, request: Request) -> RequestNeverFits | None:
        """What `add` would raise for the request, or None if the request can run here."""
        try:
            check_fits(request, self.limits)
        except RequestNeverFits as refusal:
            return refusal
        return None

    def cancel(self, request_id: RequestId, index: int | None = None) -> None:
        """End a request, or one of its completions, without an output. Unknown and ended requests are ignored."""
        group = self._groups.get(request_id)
        if group is not None and index is not None and len(group.members) > 1:
            self._worker.lifecycle.cancel_sequence(group.members[index])
        elif group is not None:
            self._worker.lifecycle.end(group)
        elif index is None and self._outputs.others:
            others = [output for output in self._outputs.others if output.request_id != request_id]
            self._outputs.others = others

    def progress(self, request_id: RequestId) -> RequestOutput | None:
        """What an output of a live request would say of it at present, without tokens. None for any other request."""
        group = self._groups.get(request_id)
        if group is None:
            return None
        output = group.output([], None)
        output.num_searched = group.num_searched
        return output

    def withdraw(self, request_id: RequestId) -> Request | None:
        """Remove a request that holds no row (waiting or paused) and return it with all tokens generated so far.

        Returns None, and changes nothing, in any other state.
        """
        group = self._groups.get(request_id)
        if group is None or group.state not in (GroupState.WAITING, GroupState.PAUSED):
            return None
        request = group.request_so_far()
        self._worker.lifecycle.end(group)
        return request

    def pause(self, request_id: RequestId) -> None:
        """Stop scheduling a request whose reader is slow. Paused requests are preempted first."""
        group = self._groups.get(request_id)
        if group is not None:
            self._worker.lifecycle.pause(group)

    def resume(self, request_id: RequestId) -> None:
        """Schedule a paused request again."""
        group = self._groups.get(request_id)
        if group is not None:
            self._worker.lifecycle.resume(group)

    def expire(self, now_s: float) -> Outputs:
        """Do what is due by time, and return every end that was not returned yet; call it regularly.

        Requests whose deadline is reached end, whatever their state. Loads that failed are tried again.
        """
        self._worker.demands.retry_due(now_s)
        self._end_expired(now_s)
        return self.take_outputs()

    def take_requests(self) -> list[Request]:
        """Every live request with its accepted tokens, in order of arrival, to go on elsewhere. Nothing may follow."""
        self._is_dead = True
        self._worker.lifecycle.abandon()
        live = sorted(self._groups.values(), key=attrgetter("order"))
        return [group.request_so_far() for group in live]

    # ---- adapter slots ----

    def apply_slot_report(self, report: SlotReport, now_s: float) -> Outputs:
        """Take the worker's report on a slot command. Raises SlotReportMismatch if no such command is under way.

        A load that failed is tried again by the first `expire` after a backoff if a later load may succeed. Else the
        requests that wait for the adapter end.
        """
        if isinstance(report, SlotReady):
            self._worker.slots.ready(report.slot_idx, report.generation, now_s)
            if report.load_time_us:
                num_bytes = self._worker.slots.slots[report.slot_idx].adapter.arena_bytes
                self._worker.costs.observe_load(num_bytes, report.load_time_us)
            self._worker.queues.mark_ready_adapters()
        elif isinstance(report, SlotEmptied):
            self._worker.purge.close(self._worker.slots.empty(report.slot_idx, report.generation))
        else:
            digest, is_given_up = self._worker.slots.failed(
                report.slot_idx, report.generation, is_retryable=report.is_retryable, now_s=now_s
            )
            self._worker.purge.close(digest)
            if is_given_up:
                self._give_up_adapter(digest, report.reason, is_mismatch=report.is_mismatch)
        return self.take_outputs()

    def slot_commands(self) -> list[SlotCommand]:
        """Loads and evictions to send, each once; call it after add, plan, apply and slot reports."""
        while True:
            for digest, reason in self._worker.placement.place(self._worker.queues.waiting.urgent_digest):
                self._give_up_adapter(digest, reason, is_crowded_out=True)
            if not self._worker.placement.is_blocked or self._worker.rows.num_leaving > 0:
                break
            victim = choose_paused(self._worker.rows.held, has_adapter=True)
            if victim is None:
                break
            self._worker.lifecycle.preempt(victim)
        self._worker.queues.mark_ready_adapters()
        return self._worker.slots.take_commands()

    def set_pinned(self, digests: Set[str]) -> None:
        """Keep exactly these adapters from eviction, from when they are in a slot."""
        self._worker.slots.set_pinned(digests)
        self._worker.queues.mark_ready_adapters()

    def purge_digest(self, digest: str) -> bool:
        """Forget the adapter's cached blocks, cache none of its live requests', and evict its slot once unused.

        A later request with the adapter ends this. Returns False, and changes nothing, if that is under way or the
        worker has nothing of the adapter: cheap to call again.
        """
        return self._worker.purge.begin(digest)

    def adapter_use(self, digest: str) -> AdapterUse:
        """What the worker has of this adapter."""
        return AdapterUse(
            is_ready=digest in self._worker.slots.ready_digests(), is_held=self._worker.purge.has_digest(digest)
        )

    # ---- plans and results ----

    def plan(self, now_s: float, max_steps: int = 1) -> StepPlan | None:
        """The next step, or None if there is nothing to compute or enough steps are in flight.

        `max_steps`, up to MAX_PLAN_STEPS: how many decode steps the plan may stand for; see run_ahead.py.
        """
        assert not self._is_dead, "a plan is requested from a scheduler whose requests were taken away"
        assert 1 <= max_steps <= MAX_PLAN_STEPS, (
            f"a plan of up to {max_steps} steps is requested: use 1 to {MAX_PLAN_STEPS}"
        )
        if not may_plan(len(self._in_flight), self.limits.plan_depth, max_steps):
            return None
        self._end_expired(now_s)
        draft = PlanDraft(self.limits.max_step_tokens, self.limits.block_size)
        self._worker.swap.plan_outs(draft)
        self._planner.fill(draft, now_s)
        if draft.is_empty and not draft.swap_outs:
            return None
        num_steps = repeat(draft, self._worker, max_steps)
        wants_logprobs = self._worker.rows.num_wanting_logprobs > 0  # host-fed rows do: beams are chosen by them
        if wants_logprobs:
            draft.feed()
        plan, steps = draft.finish(self._next_step_id, self._worker.rows.free.take_freed(), num_steps)
        if wants_logprobs:
            note_logprobs(steps)
        self._next_step_id += num_steps
        for account, num_rows in draft.decodes.num_rows_by_account.items():
            self._counters.charge_decode(account, num_rows * num_steps)
        for row, _, samples in draft.prefills:
            if samples and row.sequence.request.pooling is None:  # its first token; of a fork it may be the only one
                self._counters.charge_decode(row.sequence.request.account, 1)
        self._in_flight.extend(steps)
        return plan

    def apply(self, result: StepResult) -> Outputs:
        """Take the result of the oldest step in flight. Raises ResultMismatch if it is not that."""
        check_result(self._in_flight, result)
        step = self._in_flight.popleft()
        self._worker.swap.host.release(step.spent_host_blocks)
        if result.step_time_us:
            self._worker.costs.observe(result.step_time_us, len(step.decodes), sum(n for _, n, _ in step.prefills))
        if result.num_moved_blocks:
            self._worker.costs.observe_moves(result.num_moved_blocks, result.move_time_us)
        self._results.apply(step, result, self._outputs)  # kept here: no output is lost if this raises half way
        return self.take_outputs()

    def take_outputs(self) -> Outputs:
        """What requests gained and was not returned yet: from an `apply` that raised, and ends outside of results."""
        outputs, self._outputs = self._outputs, Outputs()
        return outputs

    # ---- numbers ----

    @property
    def num_waiting(self) -> int:
        """Live requests that hold no row, preempted and paused ones included."""
        return len(self._groups) - self._worker.rows.num_groups + self._worker.rows.num_ending_groups

    def utilization(self, prefix: PrefixKeys) -> WorkerUtilization:
        """How busy the worker is, and what it already has of the request that `prefix` was made for."""
        limits, costs, adapters = self.limits, self._worker.costs, prefix.request.adapters
        tier, num_load_bytes = self._worker.placement.tier_of(adapters)
        num_waiting = self.num_waiting
        return WorkerUtilization(
            step_us=costs.decode_step_us,
            prefill_us_per_token=costs.prefill_us_per_token,
            num_rows=limits.max_rows,
            num_rows_requested=len(self._worker.rows.held) + num_waiting,
            num_waiting=num_waiting,
            num_blocks=limits.num_blocks,
            num_free_blocks=self._worker.pool.num_available,
            block_size=limits.block_size,
            tier=tier,
            num_load_bytes=num_load_bytes,
            num_hit_tokens=prefix.num_hit_tokens(self._worker.cache, limits.block_size),
            load_us=costs.load_us,
            load_bytes=costs.load_bytes,
        )

    def stats(self) -> SchedulerStats:
        """Counts of this moment."""
        return scheduler_stats(
            self._worker,
            self._planner,
            self._results,
            self._in_flight,
            num_waiting=self.num_waiting,
            is_stuck=self._is_stuck(),
        )

    def _is_stuck(self) -> bool:
        """Whether requests could be computed, and nothing is under way.

        Paused requests do not count. Requests that wait count only where no request holds a row.
        """
        if self._in_flight or self._worker.placement.is_changing(self._worker.queues.waiting.urgent_digest):
            return False
        if self._worker.rows.held:
            return any(not row.sequence.group.is_paused for row in self._worker.rows.held)
        return len(self._worker.queues.waiting) > 0 or any(not group.is_paused for group in self._worker.queues.swapped)

    # ---- how requests end without one ----

    def _end_expired(self, now_s: float) -> None:
        for request_id in self._deadlines.pop_due(now_s):
            group = self._groups.get(request_id)
            if group is not None:
                self._outputs.others.append(ending(group, FinishReason.DEADLINE))
                self._worker.lifecycle.end(group)

    def _give_up_adapter(
        self, digest: str, reason: str, *, is_mismatch: bool = False, is_crowded_out: bool = False
    ) -> None:
        """End the requests that wait for an adapter which cannot be had."""
        self._worker.demands.end_preload(digest)
        swapped = [group for group in self._worker.queues.swapped if has_adapter(group.digest, digest)]
        for group in [*swapped, *self._worker.queues.waiting.of_digest(digest)]:
            end = ending(group, FinishReason.ADAPTER_FAILED)
            end.message, end.request = reason, group.request_so_far()
            end.is_mismatch, end.is_crowded_out = is_mismatch, is_crowded_out
            self._outputs.others.append(end)
            self._worker.lifecycle.end(group)
