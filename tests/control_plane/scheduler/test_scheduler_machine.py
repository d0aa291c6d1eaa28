"""The scheduler as a state machine: hypothesis looks for the shortest run that breaks an invariant or a token.

The worker is small, so that short runs meet preemption by both modes, forks and starving adapters.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from hypothesis import settings, strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from control_plane.scheduler.fairness import VirtualCounters
from control_plane.scheduler.invariants import check_scheduler
from control_plane.scheduler.scheduler import Scheduler
from control_plane.scheduler.settings import Policy, SchedulerSettings
from control_plane.scheduler.types import (
    BeamSearch,
    LoadSlot,
    Pooling,
    PoolingKind,
    RequestId,
    RequestOutput,
    SlotCommand,
    SlotEmptied,
    SlotLoadFailed,
    SlotReady,
    SlotReport,
    StepPlan,
)
from tests.control_plane.scheduler.factories import make_adapter, make_limits, make_request
from tests.control_plane.scheduler.ledger import Ledger
from tests.fakes.model_worker import WIDTH, ModelWorker, steps_of

ADAPTERS = [None, make_adapter("one", 60), make_adapter("two", 60), make_adapter("small", 20)]


class SchedulerMachine(RuleBasedStateMachine):
    """One scheduler, its worker, and what is between them."""

    @initialize(
        policy=st.sampled_from(list(Policy)),
        num_host_blocks=st.sampled_from([0, 12]),
        swap_us_per_block=st.sampled_from([0.0, 1e9]),
        max_step_tokens=st.sampled_from([3, 32]),
        plan_depth=st.integers(1, 3),
    )
    def begin(
        self, policy: Policy, num_host_blocks: int, swap_us_per_block: float, max_step_tokens: int, plan_depth: int
    ) -> None:
        limits = make_limits(
            num_blocks=9,
            num_host_blocks=num_host_blocks,
            max_step_tokens=max_step_tokens,
            plan_depth=plan_depth,
            hidden_width=WIDTH,
        )
        chosen = SchedulerSettings(policy=policy, swap_us_per_block=swap_us_per_block, watermark=0.0)
        self.counters = VirtualCounters({"b": 2.0})
        self.scheduler = Scheduler(limits, chosen, self.counters)
        self.worker = ModelWorker(self.scheduler.limits)
        self.ledger = Ledger(limits.max_model_len)
        self.sent: deque[StepPlan] = deque()
        self.commands: deque[SlotCommand] = deque()
        self.paused: set[RequestId] = set()
        self.pinned: set[str] = set()  # digests
        self.now_s = 0.0
        self.next_id = 1

    @rule(
        length=st.integers(1, 14),
        max_tokens=st.integers(1, 12),
        num_completions=st.sampled_from([1, 1, 2, 3]),
        is_search=st.booleans(),
        pooling=st.sampled_from([None, None, *map(Pooling, PoolingKind)]),
        adapter_idx=st.integers(0, 3),
        tenant=st.sampled_from("ab"),
        priority=st.integers(0, 1),
        deadline_s=st.sampled_from([None, None, None, 3.0]),
    )
    def arrive(
        self,
        length: int,
        max_tokens: int,
        num_completions: int,
        is_search: bool,
        pooling: Pooling | None,
        adapter_idx: int,
        tenant: str,
        priority: int,
        deadline_s: float | None,
    ) -> None:
        if length + max_tokens >= 12:
            num_completions, is_search = 1, False  # more would not fit
        if pooling is not None:
            num_completions, is_search, max_tokens = 1, False, 1
        request = make_request(
            self.next_id,
            [5] * length if self.next_id % 2 else length,
            max_tokens,
            num_samples=1 if is_search else num_completions,
            beam=BeamSearch(num_completions) if is_search else None,
            adapter=ADAPTERS[adapter_idx],
            pooling=pooling,
            tenant=tenant,
            priority=priority,
            deadline_s=None if deadline_s is None else self.now_s + deadline_s,
            arrival_s=self.now_s,
        )
        self.next_id += 1
        self.ledger.open(request)
        self.scheduler.add(request)

    @rule(max_steps=st.sampled_from([1, 1, 4]))
    def plan(self, max_steps: int) -> None:
        plan = self.scheduler.plan(self.now_s, max_steps)
        if plan is not None:
            self.sent += steps_of(plan)

    @precondition(lambda self: self.sent)
    @rule()
    def return_result(self) -> None:
        self.take(self.scheduler.apply(self.worker.execute(self.sent.popleft())))

    @rule(may_fail=st.sampled_from([False, False, True]))
    def obey(self, may_fail: bool) -> None:
        self.commands += self.scheduler.slot_commands()
        if not self.commands:
            return
        command = self.commands.popleft()
        slot, generation = command.slot_idx, command.generation
        if isinstance(command, LoadSlot) and may_fail:
            report: SlotReport = SlotLoadFailed(slot, generation, "broken", is_retryable=True)
        else:
            self.worker.obey(command)
            report = (SlotReady if isinstance(command, LoadSlot) else SlotEmptied)(slot, generation)
        self.take(self.scheduler.apply_slot_report(report, self.now_s))

    @precondition(lambda self: self.ledger.accounts)
    @rule(number=st.integers(0, 100))
    def cancel(self, number: int) -> None:
        request_id = sorted(self.ledger.accounts)[number % len(self.ledger.accounts)]
        self.scheduler.cancel(request_id)
        self.ledger.close(request_id)

    @precondition(lambda self: self.ledger.accounts)
    @rule(number=st.integers(0, 100))
    def pause_or_unpause(self, number: int) -> None:
        request_id = sorted(self.ledger.accounts)[number % len(self.ledger.accounts)]
        if request_id in self.paused:
            self.scheduler.resume(request_id)
        else:
            self.scheduler.pause(request_id)
        self.paused ^= {request_id}

    @rule(adapter_idx=st.integers(1, 3), word=st.sampled_from(["pin", "unpin", "purge_digest"]))
    def manage(self, adapter_idx: int, word: str) -> None:
        adapter = ADAPTERS[adapter_idx]
        assert adapter is not None
        if word == "purge_digest":
            self.scheduler.purge_digest(adapter.digest)
        elif word == "pin":
            self.pinned.add(adapter.digest)
        else:
            self.pinned.discard(adapter.digest)
        self.scheduler.set_pinned(self.pinned)

    @rule(seconds=st.sampled_from([0.1, 1.0, 5.0]))
    def wait(self, seconds: float) -> None:
        self.now_s += seconds
        self.take(self.scheduler.expire(self.now_s))

    @invariant()
    def state_is_consistent(self) -> None:
        if hasattr(self, "scheduler"):
            check_scheduler(self.scheduler)

    def teardown(self) -> None:
        """Whatever happened, everything ends once nothing is paused, and nothing is left."""
        if not hasattr(self, "scheduler"):
            return
        for request_id in sorted(self.paused):
            self.scheduler.resume(request_id)
        for _ in range(2000):
            if not self.ledger.accounts and not self.sent and not self.commands:
                break
            self.obey(may_fail=False)
            self.plan(max_steps=1)
            if self.sent:
                self.return_result()
            self.wait(0.1)
        assert not self.ledger.accounts, f"{len(self.ledger.accounts)} requests never ended"
        check_scheduler(self.scheduler)
        stats = self.scheduler.stats()
        assert (stats.num_waiting, stats.num_blocks_held, stats.num_host_blocks_held) == (0, 0, 0)
        assert not any(account.num_waiting for account in self.counters.stats()), "a tenant waits with nothing"

    def take(self, outputs: Iterable[RequestOutput]) -> None:
        self.ledger.take(outputs)


SchedulerMachine.TestCase.settings = settings(max_examples=40, stateful_step_count=40)
TestSchedulerMachine = SchedulerMachine.TestCase
