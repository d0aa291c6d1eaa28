"""Notices work that a worker does not finish: a step or a load that hangs while its heartbeats go on. Pure.

- A step has the worker to itself from the moment the step before is finished. Its limit follows from the latest steps:
  `SLOWDOWN` times what the slowest of them would take for as many tokens, and at least `step_timeout_s`. Until
  MIN_STEPS steps are finished the limit is `first_step_timeout_s`, because kernels may be compiled.
- A load may take `load_timeout_s` and the time of its bytes, counted from the first heartbeat that names it.
- Work that no heartbeat names for NEVER_RECEIVED_S was never received.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from contract.v1 import plan_pb2
from control_plane.fleet.settings import FleetSettings

SLOWDOWN = 20  # times the slowest of the latest steps
NUM_STEPS = 32  # the latest ones
MIN_STEPS = 8
LOAD_BYTES_PER_S = 4 << 20  # far below the speed of any store
# A worker that reports for this long that it is idle did not receive what it was sent. A plan of 64 MiB takes 20 s
# over a link of 25 Mbit/s.
NEVER_RECEIVED_S = 30.0


@dataclass(frozen=True, slots=True)
class Overdue:
    """Work that takes too long."""

    reason: str
    digest: str | None  # of the adapter if it is a load; None: a step


@dataclass(slots=True)
class _Load:
    digest: str
    num_bytes: int
    since_s: float | None = None  # since when it is under way; None: no heartbeat named it yet


class WorkWatch:
    """The steps and loads in flight at one session. The time is that of an AwakeClock."""

    def __init__(self, settings: FleetSettings) -> None:
        self._settings = settings
        self._steps: deque[int] = deque()  # tokens of each step in flight, oldest first
        self._num_finished = 0  # steps
        self._head_since_s = 0.0  # since when the oldest of them has the worker; valid while one is in flight
        self._measured: deque[tuple[int, int]] = deque(maxlen=NUM_STEPS)  # (tokens, microseconds) of finished steps
        self._loads: dict[tuple[int, int], _Load] = {}  # (slot, generation) -> load in flight
        self._no_step_since_s: float | None = None  # heartbeats name no step, though steps are in flight
        self._no_load_since_s: float | None = None  # the same for loads

    def plan_sent(self, num_steps: int, num_tokens: int, num_decodes: int, now_s: float) -> None:
        """A plan of `num_steps` steps was sent. The first step has `num_tokens`, the steps after it `num_decodes`."""
        if not self._steps:
            self._head_since_s = now_s
        self._steps.append(num_tokens)
        for _ in range(num_steps - 1):
            self._steps.append(num_decodes)

    def step_finished(self, step_time_us: int, now_s: float) -> None:
        """The oldest step in flight is finished; it took `step_time_us` on the worker."""
        self._measured.append((self._steps.popleft(), step_time_us))
        self._num_finished += 1
        self._head_since_s = now_s
        self._no_step_since_s = None

    def load_sent(self, slot: int, generation: int, digest: str, num_bytes: int) -> None:
        """The worker was sent a command to load an adapter."""
        self._loads[slot, generation] = _Load(digest, num_bytes)

    def load_finished(self, slot: int, generation: int) -> None:
        """A load succeeded or failed. It need not be known."""
        self._loads.pop((slot, generation), None)
        self._no_load_since_s = None

    def heartbeat(self, heartbeat: plan_pb2.Heartbeat, now_s: float) -> None:
        """Take the worker's report of what it is doing."""
        is_idle = heartbeat.step_id == 0 and heartbeat.num_plans_waiting == 0
        self._no_step_since_s = _since(self._no_step_since_s, now_s, is_true=is_idle and bool(self._steps))
        for entry in heartbeat.loads:
            load = self._loads.get((entry.slot, entry.generation))
            if load is not None:
                load.since_s = now_s - entry.age_ms / 1000
        is_idle = not heartbeat.loads
        self._no_load_since_s = _since(self._no_load_since_s, now_s, is_true=is_idle and bool(self._loads))

    def overdue(self, now_s: float) -> Overdue | None:
        """The work that takes too long at this time, if any does."""
        return self._overdue_step(now_s) or self._overdue_load(now_s)

    def _overdue_step(self, now_s: float) -> Overdue | None:
        if not self._steps:
            return None
        step_id, age_s = self._num_finished + 1, now_s - self._head_since_s
        if self._no_step_since_s is not None and now_s - self._no_step_since_s >= NEVER_RECEIVED_S:
            return Overdue(f"step {step_id} was sent {age_s:.1f} s ago, and the worker has nothing to do", None)
        if age_s < min(self._settings.step_timeout_s, self._settings.first_step_timeout_s):
            return None  # the usual case: the limit need not be known
        limit_s = self._step_limit_s()
        if age_s < limit_s:
            return None
        tokens = f"{self._steps[0]} tokens"
        return Overdue(
            f"step {step_id} of {tokens} hangs: no result for {age_s:.1f} s, the limit is {limit_s:.1f} s", None
        )

    def _step_limit_s(self) -> float:
        if self._num_finished < MIN_STEPS:
            return self._settings.first_step_timeout_s
        slowest_us = max(time_us * max(1.0, self._steps[0] / max(1, tokens)) for tokens, time_us in self._measured)
        return max(self._settings.step_timeout_s, SLOWDOWN * slowest_us / 1e6)

    def _overdue_load(self, now_s: float) -> Overdue | None:
        if self._no_load_since_s is not None and now_s - self._no_load_since_s >= NEVER_RECEIVED_S:
            load = next(iter(self._loads.values()))
            return Overdue(f"the load of {load.digest} was never begun", load.digest)
        for load in self._loads.values():
            limit_s = self._settings.load_timeout_s + load.num_bytes / LOAD_BYTES_PER_S
            if load.since_s is not None and now_s - load.since_s >= limit_s:
                age_s = now_s - load.since_s
                reason = f"the load of {load.digest} hangs for {age_s:.1f} s, the limit is {limit_s:.1f} s"
                return Overdue(reason, load.digest)
        return None


def _since(since_s: float | None, now_s: float, *, is_true: bool) -> float | None:
    """Since when a condition has been true without a break."""
    if not is_true:
        return None
    return now_s if since_s is None else since_s
