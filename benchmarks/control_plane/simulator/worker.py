"""One simulated worker: the production scheduler of its session, and an engine that only takes time.

It executes plans in order on a virtual clock. A token follows from its request, the seed of the completion and its
position, so that one that is lost, repeated or returned to another is noticed; every completion ends with max_tokens.
Of blocks it only counts those that are moved: what lies in them is for the tests' workers to watch.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from benchmarks.control_plane.simulator.costs import Costs
from control_plane.fleet.workers.round_trip import MIN_STEPS, RoundTrip
from control_plane.scheduler.scheduler import Scheduler
from control_plane.scheduler.types import EvictSlot, LoadSlot, SlotCommand, StepPlan, StepResult

AnyInt = TypeVar("AnyInt", int, npt.NDArray[np.int64])


def completion_key(request_id: int, seed: int) -> int:
    """What the tokens of one completion follow from: 32 bits of its request and its seed."""
    return (request_id * 0x9E3779B1 ^ seed * 0x85EBCA6B ^ seed >> 32) & 0xFFFFFFFF


def token_at(key: AnyInt, position: AnyInt) -> AnyInt:
    """The token of a completion after its first `position` tokens, the prompt's included; for arrays, of each."""
    mixed = ((key ^ position * 0x9E3779B1 & 0xFFFFFFFF) * 0x2C1B3C6D) & 0xFFFFFFFF
    return mixed >> 15 & 0x7FFF


class HostCache:
    """Which adapters lie in the host cache that all workers share: least recently loaded go first, by bytes."""

    def __init__(self, capacity_bytes: int) -> None:
        self._room_bytes = capacity_bytes
        self._bytes_by_digest: OrderedDict[str, int] = OrderedDict()
        self.num_hits = self.num_misses = 0

    def __contains__(self, digest: object) -> bool:
        return digest in self._bytes_by_digest

    def load(self, digest: str, num_bytes: int) -> bool:
        """Whether it was there; it is now."""
        if digest in self._bytes_by_digest:
            self._bytes_by_digest.move_to_end(digest)
            self.num_hits += 1
            return True
        self.num_misses += 1
        self._bytes_by_digest[digest] = num_bytes
        self._room_bytes -= num_bytes
        while self._room_bytes < 0:
            _, freed = self._bytes_by_digest.popitem(last=False)
            self._room_bytes += freed
        return False


class SimulatedWorker:
    """Scheduler and engine of one worker. Whoever owns it calls it when its events are due."""

    def __init__(self, worker_id: str, scheduler: Scheduler, costs: Costs, cache: HostCache) -> None:
        self.worker_id = worker_id
        self.scheduler = scheduler
        self.is_up = True
        self.steps: deque[StepResult] = deque()  # computed or under way, in order
        self.busy_s = 0.0  # time spent in steps
        self.num_steps = 0
        self._costs = costs
        self._cache = cache
        self._free_at_s = 0.0
        num_rows = scheduler.limits.max_rows
        self._context = np.zeros(num_rows, dtype=np.int64)  # tokens that each row has computed
        self._left = np.zeros(num_rows, dtype=np.int64)  # known tokens that its prefill has not computed
        self._slot = np.full(num_rows, -1, dtype=np.int64)
        self._key = np.zeros(num_rows, dtype=np.int64)
        self._round_trip = RoundTrip(scheduler.limits.plan_depth)
        self._slot_bytes = np.zeros(scheduler.limits.num_slots + 1, dtype=np.int64)  # by slot; the last: base model

    def execute(self, plan: StepPlan, now_s: float) -> list[float]:
        """Take a plan that was made now; returns when the result of each of its steps is back."""
        for new in plan.new_rows:
            self._context[new.row] = new.num_computed_tokens
            self._left[new.row] = new.num_tokens - new.num_computed_tokens
            self._slot[new.row] = -1 if new.slot_idx is None else new.slot_idx
            self._key[new.row] = completion_key(new.request_id, new.sampling.seed)
        decodes = plan.decode_rows
        sampled = list(decodes)
        for row, num_tokens in plan.prefills:
            self._context[row] += num_tokens
            self._left[row] -= num_tokens
            if self._left[row] == 0:
                sampled.append(row)
        rows = decodes + [row for row, _ in plan.prefills]
        prefill_tokens = sum(num_tokens for _, num_tokens in plan.prefills)
        num_moved = len(plan.swap_outs) + len(plan.swap_ins)
        ends_s = [self._step(plan.step_id, sampled, decodes, rows, prefill_tokens, now_s, num_moved)]
        decodes = sorted(sampled)
        for further in range(1, plan.num_steps):
            ends_s.append(self._step(plan.step_id + further, decodes, decodes, decodes, 0, now_s))
        return ends_s

    def obey(self, command: SlotCommand) -> float:
        """Seconds until the report of a slot command is back."""
        if isinstance(command, LoadSlot):
            num_bytes = command.arena_bytes
            self._slot_bytes[command.slot_idx] = num_bytes
            return self._costs.load(num_bytes, is_cached=self._cache.load(command.digest, num_bytes))
        assert isinstance(command, EvictSlot), f"{command} is not a slot command"
        return self._costs.evict_s

    @property
    def max_steps(self) -> int:
        """Steps that a plan may stand for, so that the link is hidden."""
        return self._round_trip.max_steps

    def take_result(self, now_s: float) -> StepResult:
        """The oldest result, which arrives now."""
        result = self.steps.popleft()
        self._round_trip.step(result.step_time_us, 0.0)
        if result.step_id == MIN_STEPS:  # the link is the same all the time: one ping says all
            self._round_trip.pong(self._round_trip.ping(now_s - 2 * self._costs.link_s), now_s)
        return result

    def _step(
        self,
        step_id: int,
        sampled: list[int],
        decodes: list[int],
        rows: list[int],
        prefill_tokens: int,
        now_s: float,
        num_moved: int = 0,
    ) -> float:
        """Take the time of one step and queue its result; returns when that is back."""
        self._context[decodes] += 1
        duration_s = self._costs.step(
            prefill_tokens=prefill_tokens,
            context_tokens=int(self._context[decodes].sum()),
            adapter_bytes=int(self._slot_bytes[np.unique(self._slot[rows])].sum()),
        )
        move_s = self._costs.move(num_moved * self.scheduler.limits.block_size)
        duration_s += move_s
        self._free_at_s = max(self._free_at_s, now_s + self._costs.link_s) + duration_s
        self.busy_s += duration_s
        self.num_steps += 1
        tokens = token_at(self._key[sampled], self._context[sampled]).tolist()
        self.steps.append(
            StepResult(
                step_id,
                sampled,
                tokens,
                step_time_us=round(duration_s * 1e6),
                num_moved_blocks=num_moved,
                move_time_us=round(move_s * 1e6),
            )
        )
        return self._free_at_s + self._costs.link_s
