"""A random walk over one scheduler and a model worker: arrivals, cancels, pauses, deadlines, failures, late results,
requests that are taken back while they wait.

Everything follows from the seed. Used by test_random_walk.py.
"""

from __future__ import annotations

import hashlib
import random
from collections import deque
from collections.abc import Iterable
from dataclasses import replace

from control_plane.scheduler.admission import make_group
from control_plane.scheduler.errors import RequestNeverFits
from control_plane.scheduler.fairness import VirtualCounters
from control_plane.scheduler.invariants import check_scheduler
from control_plane.scheduler.probe import SchedulerProbe
from control_plane.scheduler.scheduler import Scheduler
from control_plane.scheduler.settings import Policy, SchedulerSettings
from control_plane.scheduler.types import (
    AdapterRef,
    AdapterUse,
    BeamSearch,
    Combination,
    Composition,
    EvictSlot,
    LoadSlot,
    Pooling,
    PoolingKind,
    Request,
    RequestId,
    RequestOutput,
    Sampling,
    SlotCommand,
    SlotEmptied,
    SlotLoadFailed,
    SlotReady,
    StepPlan,
    WorkerLimits,
)
from tests.control_plane.scheduler.ledger import Ledger
from tests.fakes.model_worker import VOCAB_SIZE, WIDTH, ModelWorker, steps_of


class Walk:
    """One seeded run. All state is checked each `check_every` moves, of which about one in four makes a plan."""

    def __init__(self, seed: int, policy: Policy, *, check_every: int = 40, has_trace: bool = False) -> None:
        rng = self.rng = random.Random(seed)
        self.check_every = check_every
        self.limits = WorkerLimits(
            num_blocks=rng.choice([6, 9, 16, 40]),
            block_size=rng.choice([1, 2, 4]),
            max_rows=rng.choice([1, 3, 6, 12]),
            max_step_tokens=rng.choice([1, 4, 7, 16, 64]),
            num_slots=rng.choice([1, 2, 3, 6]),
            arena_bytes=rng.choice([100, 200]),
            max_model_len=rng.choice([12, 24, 200]),
            plan_depth=rng.choice([1, 2, 3, 4]),
            num_host_blocks=rng.choice([0, 4, 30]),
            hidden_width=WIDTH,
        )
        self.settings = SchedulerSettings(
            policy=policy,
            max_step_tokens=rng.choice([None, None, 5]),
            max_sequences=rng.choice([None, None, 4]),
            watermark=rng.choice([0.0, 0.01, 0.2]),
            max_blocked_steps=rng.choice([1, 3, 64]),
            max_partial_prefills=rng.choice([1, 2, 4]),
            long_prefill_tokens=rng.choice([None, 1, 10]),
            swap_us_per_block=rng.choice([0.0, 40.0]),
            adapter_us_per_mib=rng.choice([0.0, 1e12]),
        )
        self.counters = VirtualCounters({"a": rng.choice([0.5, 1.0, 3.0])})
        self.tenants = rng.choice([["a"], ["a", "b"], ["a", "b", "c", "d"]])
        self.priorities = rng.choice([[0], [0, 0, 1, 5]])
        self.scheduler = Scheduler(self.limits, self.settings, self.counters)
        self.probe = SchedulerProbe(self.scheduler)
        self.pinned: set[str] = set()  # digests
        waits = random.Random(f"waits {seed}")
        self.wait_rate = waits.choice([0.0, 0.0, 0.0, 0.03, 0.25])
        self.worker = ModelWorker(self.limits, waits=lambda: waits.random() < self.wait_rate)
        names = [hashlib.sha256(b"%d" % i).hexdigest() for i in range(rng.choice([1, 3, 8]))]
        self.adapters = [AdapterRef(name, rng.choice([10, 30, 60, 100])) for name in names]
        self.failure_rate = rng.choice([0.0, 0.0, 0.3])
        self.not_finite_rate = rng.choice([0.0, 0.0, 0.01])
        self.max_steps = rng.choice([1, 4])
        self.max_live = rng.choice([3, 10, 30])
        self.now_s = 0.0
        self.next_id = 1
        self.begun_pooling: set[RequestId] = set()  # requests for vectors that had a row
        self.ledger = Ledger(self.limits.max_model_len)
        self.live = self.ledger.accounts
        self.paused: set[RequestId] = set()
        self.sent: deque[StepPlan] = deque()  # steps on the wire
        self.commands: deque[SlotCommand] = deque()  # commands on the wire
        self.free_before: set[int] = set()
        self.num_moves = 0
        self.num_plans = 0
        self.num_steps = 0  # that the plans stand for
        self.num_repeated = 0  # plans of several steps
        self.num_groups = 0  # requests with several completions
        self.num_beam_searches = 0
        self.num_fed = 0  # tokens of beams
        self.num_groups_swapped_in = 0  # plans that brought one of them back
        self.num_copies = 0  # blocks copied by forks
        self.num_withdrawn = 0  # requests taken back while they waited
        self.num_ended_before_move = 0  # cancelled before the plan that was to move their blocks, with steps under way
        self.num_combined = 0  # requests with several adapters
        self.num_preempted_pooling = 0  # requests for vectors that had begun, and began again
        self.num_set_aside = 0  # requests that others could pass, for they lacked room
        self.num_preempted_for_room = 0  # requests that were preempted for one of those
        self.trace = hashlib.sha256() if has_trace else None

    def run(self, num_steps: int) -> None:
        """Walk until so many steps were planned, then let everything end and look for what is left."""
        while self.num_steps < num_steps:
            self.step()
        for request_id in sorted(self.paused):
            self.scheduler.resume(request_id)
        self.paused.clear()
        self.failure_rate = 0.0
        for _ in range(100_000):
            if not self.live and not self.sent and not self.commands:
                break
            self.exchange()
        assert not self.live, f"{len(self.live)} requests never ended"
        check_scheduler(self.scheduler)
        assert not any(tenant.num_waiting for tenant in self.counters.stats()), "a tenant waits with nothing"
        stats = self.scheduler.stats()
        assert (stats.num_blocks_held, stats.num_waiting, stats.num_running) == (0, 0, 0)

    def step(self) -> None:
        """Something happens outside, then something on the wire."""
        rng = self.rng
        if len(self.live) < self.max_live and rng.random() < 0.5:
            self.arrive()
        if self.live and rng.random() < 0.1:
            request_id = rng.choice(sorted(self.live))
            draw = rng.random()
            if draw < 0.3:
                self.cancel(request_id)
            elif request_id in self.paused:
                self.paused.discard(request_id)
                self.scheduler.resume(request_id)
            else:
                self.paused.add(request_id)
                self.scheduler.pause(request_id)
        if self.live and rng.random() < 0.05:
            self.withdraw(rng.choice(sorted(self.live)))
        if rng.random() < 0.03:
            manage = rng.choice([self.scheduler.purge_digest, self.pinned.add, self.pinned.discard])
            manage(rng.choice(self.adapters).digest)
            self.scheduler.set_pinned(self.pinned)
        self.exchange()

    def exchange(self) -> None:
        """One move of the fleet or the worker, then the checks."""
        rng = self.rng
        self.now_s += rng.random()
        draw = rng.random()
        if draw < 0.5:
            self.make_plan()
        elif draw < 0.9 and self.sent:
            self.return_result()
        elif draw < 0.98:
            self.obey_command()
        else:
            self.take(self.scheduler.expire(self.now_s))
        self.commands.extend(self.scheduler.slot_commands())
        victim = self.probe.latest_paused_id()
        if victim is not None and rng.random() < 0.2:
            self.probe.preempt(victim)  # as slot commands do for an adapter, which is too rare here
        if self.probe.moves_to_come() and self.sent:
            self.cancel_before_a_move()
        if self.scheduler.stats().is_stuck:
            self.make_plan()
            assert not self.scheduler.stats().is_stuck, "requests wait, nothing is under way, and no plan is made"
        moves = [*self.probe.moves_to_come(), *(move for plan in self.sent for move in plan.swap_outs)]
        free = self.probe.free_blocks() - {block_id for block_id, _ in moves}  # those are read once more
        self.worker.poison(sorted(free - self.free_before))
        self.free_before = free
        self.num_moves += 1
        if self.num_moves % self.check_every == 0:
            check_scheduler(self.scheduler)

    def arrive(self) -> None:
        """A request that fits; prompts share prefixes."""
        rng, limits = self.rng, self.limits
        most = min(limits.max_model_len, limits.num_blocks * limits.block_size)
        length = rng.randint(1, max(1, min(most - 1, 30)))
        prompt = ([7] * 12 + rng.choices(range(VOCAB_SIZE), k=30))[-length:]
        if rng.random() < 0.5:
            prompt = ([1, 2, 3, 4, 5, 6, 7, 8] * 5)[:length]
        max_tokens = rng.randint(1, max(1, most - length))
        request = Request(
            request_id=RequestId(self.next_id),
            prompt_token_ids=tuple(prompt),
            max_tokens=min(max_tokens, 40) if most < 200 else rng.choice([1, 5, 40]),
            adapter=None if rng.random() < 0.3 else rng.choice(self.adapters[: rng.randint(1, len(self.adapters))]),
            stop_token_ids=frozenset(rng.sample(range(VOCAB_SIZE), rng.choice([0, 0, 2]))),
            cache_salt=rng.choice([b"", b"", b"salt"]),
            arrival_s=self.now_s,
            tenant=rng.choice(self.tenants),
            charged_to=rng.choice(["", "", "account"]),
            priority=rng.choice(self.priorities),
            deadline_s=self.now_s + rng.uniform(1, 60) if rng.random() < 0.1 else None,
            sampling=Sampling(
                temperature=rng.choice([0.0, 1.0]),
                seed=rng.randrange(2**64),
                min_tokens=rng.choice([0, 0, 3]),
                num_logprobs=rng.choice([None] * 7 + [2]),
                num_prompt_logprobs=rng.choice([None] * 7 + [1]),
            ),
            num_samples=rng.choice([1, 1, 2, 4]),
        )
        if rng.random() < 0.15:
            beam = BeamSearch(rng.choice([2, 3, 5]), rng.choice([-1.0, 0.0, 1.0]), rng.random() < 0.5)
            sampling = Sampling(min_tokens=request.sampling.min_tokens)
            request = replace(
                request, beam=beam, num_samples=1, sampling=sampling, max_tokens=min(request.max_tokens, 12)
            )
        request = self.with_adapters(request) if rng.random() < 0.85 else self.pooled(request)
        self.next_id += 1
        try:
            make_group(request, self.scheduler.limits, 0)
        except RequestNeverFits:
            request = replace(request, num_samples=1, beam=None)  # fits by what was chosen above
        self.num_groups += request.num_samples > 1
        self.num_beam_searches += request.beam is not None
        account = self.ledger.open(request)
        if rng.random() < 0.1:  # came from a worker that was lost
            request = account.resumed(rng)
        self.scheduler.add(request)

    def pooled(self, request: Request) -> Request:
        """The same prompt for a vector."""
        num_labels = self.rng.choice([0, 3]) if request.adapter is not None else 0
        kind = self.rng.choice(list(PoolingKind))
        pooling = Pooling(PoolingKind.LAST if num_labels else kind, num_labels)
        return replace(
            request,
            pooling=pooling,
            max_tokens=1,
            num_samples=1,
            beam=None,
            sampling=Sampling(),
            stop_token_ids=frozenset(),
        )

    def with_adapters(self, request: Request) -> Request:
        """Now and then the request combines adapters, or its adapter acts from some token on."""
        rng, length = self.rng, len(request.prompt_token_ids)
        if request.adapter is None or rng.random() < 0.5:
            return request
        if rng.random() < 0.3:
            return replace(request, active_from=rng.randrange(length))
        refs = rng.sample(self.adapters, rng.randint(1, min(4, len(self.adapters), self.limits.num_slots)))
        uses = tuple(AdapterUse(ref, rng.choice([1.0, 0.5, -2.0])) for ref in refs)
        composition = Composition(uses, rng.choice(list(Combination)))
        self.num_combined += len(uses) > 1
        combined = replace(request, adapter=refs[0], composition=composition)
        has_room = sum(ref.arena_bytes for ref in refs) <= self.limits.arena_bytes
        return combined if has_room else request

    def cancel(self, request_id: RequestId) -> None:
        """Cancel a request, or one completion of it."""
        account = self.live[request_id]
        if len(account.live) > 1 and not account.hypotheses and self.rng.random() < 0.5:
            index = self.rng.choice(sorted(account.live))
            self.scheduler.cancel(request_id, index)
            account.live.discard(index)
            return
        self.scheduler.cancel(request_id)
        self.ledger.close(request_id)
        self.paused.discard(request_id)

    def cancel_before_a_move(self) -> None:
        """Now and then cancel a request, or one completion of it, whose blocks the next plan was to move out."""
        check_scheduler(self.scheduler)
        for request_id, is_in_flight in self.probe.ids_moving_out().items():
            if request_id in self.live and self.rng.random() < 0.8:
                self.num_ended_before_move += is_in_flight
                self.cancel(request_id)
                check_scheduler(self.scheduler)

    def withdraw(self, request_id: RequestId) -> None:
        """Another worker could take the request, if it waits: it goes there for good, or comes back at once."""
        request = self.scheduler.withdraw(request_id)
        if request is None:
            return
        self.num_withdrawn += 1
        account = self.live[request_id]
        account.check_carried(request)
        self.paused.discard(request_id)
        if self.rng.random() < 0.5:
            self.ledger.close(request_id)
        else:
            self.scheduler.add(request)

    def make_plan(self) -> None:
        """Ask for a plan; it is executed when its turn comes."""
        scheduler = self.scheduler
        aside, given_way = set(self.probe.set_aside_ids()), self.probe.ids_preempted_for_room()
        plan = scheduler.plan(self.now_s, self.rng.randint(1, self.max_steps))
        self.num_set_aside += len(set(self.probe.set_aside_ids()) - aside)
        self.num_preempted_for_room += len(self.probe.ids_preempted_for_room() - given_way)
        if plan is not None:
            self.num_plans += 1
            self.num_repeated += plan.num_steps > 1
            self.num_copies += len(plan.block_copies)
            self.num_fed += len(plan.fed_tokens)
            new_ids = [new.request_id for new in plan.new_rows]
            pooling = {new.request_id for new in plan.new_rows if new.pooling is not None}
            self.num_preempted_pooling += len(pooling & self.begun_pooling)
            self.begun_pooling |= pooling
            self.num_groups_swapped_in += len(plan.swap_ins) > 0 and len(new_ids) > len(set(new_ids))
            self.num_steps += plan.num_steps
            if self.trace is not None:
                self.trace.update(repr(plan).encode())
            self.sent.extend(steps_of(plan))

    def return_result(self) -> None:
        """The worker executes the oldest plan and returns its result; now and then a row's logits are not finite."""
        result = self.worker.execute(self.sent.popleft())
        if result.rows and self.rng.random() < self.not_finite_rate:
            idx = self.rng.randrange(len(result.rows))
            result.pooled.pop(result.rows[idx], None)
            result = replace(
                result,
                rows=result.rows[:idx] + result.rows[idx + 1 :],
                token_ids=result.token_ids[:idx] + result.token_ids[idx + 1 :],
                failed_rows=[result.rows[idx]],
            )
        self.take(self.scheduler.apply(result))

    def obey_command(self) -> None:
        """The worker executes the oldest command, or fails to load."""
        if not self.commands:
            return
        command = self.commands.popleft()
        if isinstance(command, EvictSlot):
            self.worker.obey(command)
            self.take(self.scheduler.apply_slot_report(SlotEmptied(command.slot_idx, command.generation), self.now_s))
        elif isinstance(command, LoadSlot) and self.rng.random() < self.failure_rate:
            is_retryable = self.rng.random() < 0.8
            self.take(
                self.scheduler.apply_slot_report(
                    SlotLoadFailed(command.slot_idx, command.generation, "broken", is_retryable=is_retryable),
                    self.now_s,
                )
            )
        else:
            self.worker.obey(command)
            self.take(self.scheduler.apply_slot_report(SlotReady(command.slot_idx, command.generation), self.now_s))

    def take(self, outputs: Iterable[RequestOutput]) -> None:
        """Deliver outputs; whoever ends normally must have exactly the oracle's tokens."""
        self.paused.difference_update(self.ledger.take(outputs))


def trace(seed: int, num_steps: int) -> str:
    """A hash of every plan of a walk under the default policy."""
    walk = Walk(seed, Policy.CHUNKED_PREFILL, has_trace=True)
    walk.run(num_steps)
    assert walk.trace is not None
    return walk.trace.hexdigest()
