"""The scheduler of one worker: requests and results in, plans and slot commands out.

Pure and deterministic: no I/O, and the time is an argument. The fleet calls it from one task. What a step
holds is the planner's to say. Plans may be made ahead of results; whoever leaves (ended, cancelled, preempted) keeps
row, blocks and slot until the last unanswered plan that names it is answered, so nothing that a worker may still touch
is ever given away. Only blocks that a plan moves to host memory are free for that plan already. A plan may
consist of such moves alone.
"""

# Every entry takes the time, whether its rules need it today or not: callers need not know.
# ruff: noqa: ARG002

from __future__ import annotations

from collections import deque
from itertools import islice

from control_plane.scheduler.admission import make_group
from control_plane.scheduler.answers import AnswerBook, ending
from control_plane.scheduler.deadlines import Deadlines
from control_plane.scheduler.fairness import VirtualCounters
from control_plane.scheduler.invariants import check_scheduler
from control_plane.scheduler.plan_draft import Flight, PlanDraft, check_answer, note_logprobs
from control_plane.scheduler.planner import Planner
from control_plane.scheduler.preemption import choose_paused
from control_plane.scheduler.roster import Roster, by_order
from control_plane.scheduler.run_ahead import MAX_PLAN_STEPS, may_plan, repeat
from control_plane.scheduler.sequence_group import GroupState
from control_plane.scheduler.settings import DEFAULT_SETTINGS, SchedulerSettings
from control_plane.scheduler.stats import SchedulerStats
from control_plane.scheduler.step_costs import StepCosts
from control_plane.scheduler.types import (
    FinishReason,
    Outputs,
    Request,
    RequestId,
    SlotCommand,
    StepPlan,
    StepResult,
    WorkerLimits,
)


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
        self.counters = VirtualCounters() if counters is None else counters
        self.costs = StepCosts(settings)
        self.roster = roster = Roster(limits, settings, self.counters, self.costs)
        # Its parts at hand; they are the roster's for good.
        self.pool, self.cache, self.slots, self.rows = roster.pool, roster.cache, roster.slots, roster.rows
        self.waiting, self.running, self.groups = roster.waiting, roster.running, roster.groups
        self.flights: deque[Flight] = deque()  # unanswered steps, oldest first
        self._planner = Planner(limits, roster, settings, self.counters, self.costs)
        self._answers = AnswerBook(roster)
        self._deadlines = Deadlines()
        self._outputs = Outputs()  # not told yet
        self._next_step_id = 1
        self._next_serial = 0
        self._is_dead = False

    # ---- requests ----

    def add(self, request: Request, now_s: float) -> None:
        """Queue a request; its adapter is asked for at once.

        Raises RequestNeverFits (or its subclasses for context and adapter) if it could not run here even alone.
        """
        assert not self._is_dead, "a request is added to a scheduler whose requests were taken away"
        assert request.request_id not in self.groups, f"request {request.request_id} is added twice"
        group = make_group(request, self.limits, self._next_serial)
        self._next_serial += 1
        self.roster.add(group)
        if request.deadline_s is not None:
            self._deadlines.add(request.deadline_s, request.request_id)
            if len(self._deadlines) > 64 + 2 * len(self.groups):
                self._deadlines.keep_only(set(self.groups))

    def cancel(self, request_id: RequestId, now_s: float, index: int | None = None) -> None:
        """End a request, or one answer of several, without a word; unknown and ended ones are fine."""
        group = self.groups.get(request_id)
        if group is not None and index is not None and len(group.members) > 1:
            self.roster.give_up_member(group.members[index])
        elif group is not None:
            self.roster.end(group)
        elif index is None and self._outputs.others:
            others = [output for output in self._outputs.others if output.request_id != request_id]
            self._outputs.others = others

    def num_searched(self, request_id: RequestId) -> int:
        """Tokens computed over all beams of a live search; 0 for what is none."""
        group = self.groups.get(request_id)
        return 0 if group is None else group.num_searched

    def withdraw(self, request_id: RequestId) -> Request | None:
        """Give a request that waits for a row, or for its reader without one, back with every accepted token.

        None, and nothing changes, if it is none such.
        """
        group = self.groups.get(request_id)
        if group is None or group.state not in (GroupState.WAITING, GroupState.HELD):
            return None
        request = group.request_so_far()
        self.roster.end(group)
        return request

    def latest_unstarted(self, count: int) -> list[RequestId]:
        """Requests that wait for their first row here, at most so many, the last to come first."""
        return list(islice(reversed(self.roster.unstarted), count))

    def pause(self, request_id: RequestId) -> None:
        """Stop scheduling a request whose reader is slow. It gives way first when anything is short."""
        group = self.groups.get(request_id)
        if group is not None:
            self.roster.hold(group)

    def unpause(self, request_id: RequestId) -> None:
        """Schedule a paused request again."""
        group = self.groups.get(request_id)
        if group is not None:
            self.roster.unhold(group)

    def expire(self, now_s: float) -> Outputs:
        """Do what time brings about, and return every end that is not told yet; to be called every so often.

        Requests whose deadline is reached end, wherever they are, and loads that failed are tried again.
        """
        self.slots.retry_due(now_s)
        self._end_expired(now_s)
        return self.take_outputs()

    def drain_requests(self) -> list[Request]:
        """Everything live with its accepted tokens, in order of arrival, to go on elsewhere. It is dead after this."""
        self._is_dead = True
        self.roster.abandon()
        live = sorted(self.groups.values(), key=by_order)
        return [group.request_so_far() for group in live]

    # ---- adapter slots ----

    def slot_ready(self, slot: int, generation: int, load_time_us: int = 0) -> None:
        """The worker loaded a slot, in this time; 0: it teaches nothing. Raises SlotReportMismatch if not told to."""
        self.slots.ready(slot, generation)
        if load_time_us:
            self.costs.observe_load(self.slots.slots[slot].adapter.arena_bytes, load_time_us)
        self.roster.offer_adapters()

    def slot_empty(self, slot: int, generation: int) -> None:
        """The worker emptied a slot. Raises SlotReportMismatch if it was not told to."""
        self.roster.close_purge(self.slots.empty(slot, generation))

    def slot_failed(
        self,
        slot: int,
        generation: int,
        reason: str,
        *,
        is_retryable: bool,
        is_mismatch: bool = False,
        now_s: float,
    ) -> Outputs:
        """A load failed: tried again later if that may help, else the requests that wait for it end.

        Later is the first `expire` after a backoff. `is_mismatch`: the adapter itself does not fit the model.
        """
        digest, is_given_up = self.slots.failed(slot, generation, is_retryable=is_retryable, now_s=now_s)
        self.roster.close_purge(digest)
        if is_given_up:
            self._give_up_adapter(digest, reason, is_mismatch=is_mismatch)
        return self.take_outputs()

    def slot_commands(self) -> list[SlotCommand]:
        """Loads and evictions to send, each once; call it after add, plan, apply and slot reports."""
        while True:
            for digest, reason in self.slots.place(self.waiting.urgent_digest):
                self._give_up_adapter(digest, reason)
            if not self.slots.is_blocked or self.roster.num_draining > 0:
                break
            victim = choose_paused(self.running, has_adapter=True)
            if victim is None:
                break
            self.roster.preempt(victim)
        self.roster.offer_adapters()
        return self.slots.drain_commands()

    def pin(self, digest: str) -> None:
        """Keep an adapter in its slot, whenever it lies in one."""
        self.slots.pin(digest)
        self.roster.offer_adapters()

    def unpin(self, digest: str) -> None:
        """Allow the eviction of an adapter again."""
        self.slots.unpin(digest)
        self.roster.offer_adapters()

    def purge_digest(self, digest: str) -> bool:
        """Forget the adapter's cached blocks, cache none of its live requests', and evict its slot once unused.

        A later request with the adapter ends this. False, and nothing changes, if that is under way or there is
        nothing of it: cheap to call again.
        """
        return self.roster.purge(digest)

    def has_digest(self, digest: str) -> bool:
        """Whether a live or leaving request, a slot or a cached block has this adapter."""
        return self.roster.has_digest(digest)

    def resident_digests(self) -> set[str]:
        """Adapters that plans may use at once."""
        return self.slots.ready_digests()

    # ---- plans and results ----

    def plan(self, now_s: float, max_steps: int = 1) -> StepPlan | None:
        """The next step, or None if there is nothing to compute or enough steps are unanswered.

        `max_steps`, up to MAX_PLAN_STEPS: how many decode steps the plan may stand for; see run_ahead.
        """
        assert not self._is_dead, "a plan is asked of a scheduler whose requests were taken away"
        assert 1 <= max_steps <= MAX_PLAN_STEPS, f"a plan of up to {max_steps} steps is asked for"
        if not may_plan(len(self.flights), self.limits.plan_depth, max_steps):
            return None
        self._end_expired(now_s)
        draft = PlanDraft(self.limits.max_step_tokens, self.limits.block_size)
        self.roster.swap.tell_outs(draft)
        self._planner.fill(draft, now_s)
        if draft.is_empty and not draft.swap_outs:
            return None
        num_steps = repeat(draft, self.roster, max_steps)
        if self.roster.num_telling > 0:
            draft.feed()
        plan, flights = draft.finish(self._next_step_id, self.rows.tell_freed(), num_steps)
        if self.roster.num_telling > 0:
            note_logprobs(flights)
        self._next_step_id += num_steps
        for account, num_rows in draft.decodes.num_rows_by_account.items():
            self.counters.charge_decode(account, num_rows * num_steps)
        for sequence, _, samples in draft.prefills:
            if samples:  # its first token; of a fork it may be the only one
                self.counters.charge_decode(sequence.request.account, 1)
        self.flights.extend(flights)
        return plan

    def apply(self, result: StepResult, now_s: float) -> Outputs:
        """Take the answer to the oldest unanswered step. Raises ResultMismatch if it is not that."""
        check_answer(self.flights, result)
        flight = self.flights.popleft()
        self.roster.swap.host.release(flight.spent_host_blocks)
        if result.step_time_us:
            self.costs.observe(result.step_time_us, len(flight.decodes), sum(n for _, n, _ in flight.prefills))
        if result.num_moved_blocks:
            self.costs.observe_moves(result.num_moved_blocks, result.move_time_us)
        self._answers.book(flight, result, self._outputs)  # kept here: none is lost if a book breaks half way
        return self.take_outputs()

    def take_outputs(self) -> Outputs:
        """What requests gained and is not told yet: of an `apply` that raised, and ends that came up elsewhere."""
        outputs, self._outputs = self._outputs, Outputs()
        return outputs

    # ---- numbers ----

    @property
    def num_unfinished(self) -> int:
        """Live requests."""
        return len(self.groups)

    @property
    def num_waiting(self) -> int:
        """Live requests that hold no row, preempted and paused ones included."""
        return len(self.groups) - self.roster.num_running_groups + self.roster.num_ending_groups

    @property
    def is_stuck(self) -> bool:
        """Whether there is work and nothing is under way that it could wait for. Right after `plan`: a bug.

        Work is a request that runs and is read; where none runs, one that waits.
        """
        if self.flights or self.slots.is_changing(self.waiting.urgent_digest):
            return False
        if self.running:
            return any(not sequence.group.is_paused for sequence in self.running)
        return len(self.waiting) > 0 or any(not group.is_paused for group in self.roster.swap)

    def stats(self) -> SchedulerStats:
        """Counts of this moment."""
        return SchedulerStats(
            num_waiting=self.num_waiting,
            num_running=self.roster.num_running_groups,
            num_paused=self.roster.num_paused,
            num_blocks=self.pool.num_blocks,
            num_blocks_held=self.pool.num_held,
            num_blocks_cached=len(self.pool.evictable),
            num_plans_in_flight=sum(flight.ends_plan for flight in self.flights),
            arena_used_bytes=self.slots.used_bytes,
            num_adapters_loaded=len(self.slots.ready_digests()),
            prefix_query_tokens=self._planner.prefix_query_tokens,
            prefix_hit_tokens=self._planner.prefix_hit_tokens,
            num_preemptions=self.roster.num_preemptions,
            num_swapped=len(self.roster.swap),
            num_swapped_out=self.roster.swap.num_swapped_out,
            num_host_blocks=self.roster.swap.host.num_blocks,
            num_host_blocks_held=self.roster.swap.host.num_blocks - self.roster.swap.host.num_free,
            num_tokens_sampled=self._answers.num_tokens_sampled,
        )

    def check_invariants(self) -> None:
        """Raise AssertionError with a sentence if any book does not balance. Looks at everything: for tests."""
        check_scheduler(self)

    # ---- how requests end without one ----

    def _end_expired(self, now_s: float) -> None:
        for request_id in self._deadlines.pop_due(now_s):
            group = self.groups.get(request_id)
            if group is not None:
                self._outputs.others.append(ending(group, FinishReason.DEADLINE))
                self.roster.end(group)

    def _give_up_adapter(self, digest: str, reason: str, *, is_mismatch: bool = False) -> None:
        """End the requests that wait for an adapter which cannot be had."""
        swapped = [group for group in self.roster.swap if group.digest == digest]
        for group in [*swapped, *self.waiting.of_digest(digest)]:
            end = ending(group, FinishReason.ADAPTER_FAILED)
            end.message, end.request, end.is_mismatch = reason, group.request_so_far(), is_mismatch
            self._outputs.others.append(end)
            self.roster.end(group)
