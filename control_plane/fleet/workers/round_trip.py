"""Measures the way to one worker and back, and how many steps a plan must stand for to hide it. Pure.

A result frees room for a plan. That plan reaches the worker one round trip and one turnaround later. Meanwhile the
worker has (plan_depth - 1) plans of n steps to do (scheduler/step/run_ahead.py), so it never waits while

    (plan_depth - 1) * n * step_time >= round_trip + turnaround

n is the least number for which this is true, at most MAX_PLAN_STEPS. A larger n would only make new requests wait
longer. With a plan depth of 1 no plan runs ahead, and n is 1.
"""

from __future__ import annotations

import math
from collections import deque
from statistics import median

from contract.plan_stream.plan_bounds import MAX_PLAN_STEPS

_NUM_SAMPLES = 8  # round trips; with the usual heartbeat those of the last four seconds
_NUM_STEPS = 32
_MAX_OPEN_PINGS = 64  # pings; a worker that is so far behind has been silent for long and is given up
MIN_STEPS = 8  # steps before their time is used
_TURNAROUND_WEIGHT = 1 / 16  # of the latest one in the running mean


class RoundTrip:
    """Measures one session."""

    def __init__(self, plan_depth: int, min_steps: int = 1) -> None:
        self._plan_depth = plan_depth
        self._min_steps = min_steps
        self._num_pings = 0
        self._sent_s: dict[int, float] = {}  # sequence -> when sent; pings without a pong
        self._round_trips_s: deque[float] = deque(maxlen=_NUM_SAMPLES)
        self._steps_us: deque[int] = deque(maxlen=_NUM_STEPS)
        self._turnaround_s = 0.0
        self.max_steps = min_steps  # steps that a plan may stand for

    def ping(self, now_s: float) -> int:
        """Sequence number of a ping that is sent at this time."""
        self._num_pings += 1
        self._sent_s[self._num_pings] = now_s
        self._sent_s.pop(self._num_pings - _MAX_OPEN_PINGS, None)
        return self._num_pings

    def pong(self, sequence: int, now_s: float) -> float | None:
        """Take the pong to a ping: the time of its round trip, seconds. None if no such ping is open."""
        sent_s = self._sent_s.pop(sequence, None)
        if sent_s is None:
            return None
        self._round_trips_s.append(now_s - sent_s)
        self._update_max_steps()
        return now_s - sent_s

    def step(self, step_time_us: int, turnaround_s: float) -> None:
        """Take the worker's time for a step, and how long its result took from here to the plan that follows it."""
        self._steps_us.append(step_time_us)
        self._turnaround_s += (turnaround_s - self._turnaround_s) * _TURNAROUND_WEIGHT
        if len(self._steps_us) == MIN_STEPS:  # from then on, every pong updates it
            self._update_max_steps()

    @property
    def round_trip_s(self) -> float:
        """Median of the last round trips; 0 before the first."""
        return median(self._round_trips_s) if self._round_trips_s else 0.0

    @property
    def step_time_s(self) -> float:
        """Median time of the last steps; 0 before the first."""
        return median(self._steps_us) / 1e6 if self._steps_us else 0.0

    def _update_max_steps(self) -> None:
        if len(self._steps_us) >= MIN_STEPS and self._round_trips_s:
            self.max_steps = max(self._min_steps, self.steps_to_hide())

    def steps_to_hide(self) -> int:
        """Steps that a plan must stand for so that the worker never waits, as far as MAX_PLAN_STEPS allows."""
        hidden_s = (self._plan_depth - 1) * self.step_time_s  # by plans of one step
        if self._plan_depth == 1:
            return 1
        if hidden_s == 0:
            return MAX_PLAN_STEPS
        return min(MAX_PLAN_STEPS, max(1, math.ceil((self.round_trip_s + self._turnaround_s) / hidden_s)))
