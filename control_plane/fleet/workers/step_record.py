"""What one session's plans and results say: counts, times, which requests have rows, whether the worker is sound."""

from __future__ import annotations

from collections import deque

from control_plane.scheduler.types import RequestId, StepPlan, StepResult

_NUM_STEP_TIMES = 32
MAX_NOT_FINITE = 4  # of the latest rows, all not finite: that many are hardly caused by the requests


class StepRecord:
    """Plans that were sent, and steps that were finished."""

    def __init__(self) -> None:
        self.num_plans = 0  # sent
        self.num_steps = 0  # finished
        self._request_by_row: dict[int, RequestId] = {}
        self._step_times_us: deque[int] = deque(maxlen=_NUM_STEP_TIMES)
        self._has_given_tokens = False
        self._num_not_finite = 0  # rows since the worker gave a token

    def plan_sent(self, plan: StepPlan) -> None:
        """A plan left."""
        self.num_plans += 1
        for row in plan.freed_rows:
            self._request_by_row.pop(row, None)
        for new in plan.new_rows:
            self._request_by_row[new.row] = new.request_id

    def step_finished(self, result: StepResult, step_time_us: int) -> None:
        """A result came."""
        self.num_steps += 1
        self._step_times_us.append(step_time_us)
        if result.rows:
            self._has_given_tokens, self._num_not_finite = True, 0
        else:
            self._num_not_finite += len(result.failed_rows) - len(result.unconstrained_rows)

    @property
    def running_request_ids(self) -> set[RequestId]:
        """Requests that have a row at the worker, including those that ended just now."""
        return set(self._request_by_row.values())

    @property
    def gives_tokens(self) -> bool:
        """Whether the worker seems to compute soundly: it gave a token, and few rows were not finite since."""
        return self._has_given_tokens and self._num_not_finite < MAX_NOT_FINITE

    @property
    def step_time_ms(self) -> float:
        """Mean time of the last steps; 0 before the first."""
        times_us = self._step_times_us
        return sum(times_us) / len(times_us) / 1000 if times_us else 0.0
