"""Lines of the worker's log: a request takes a row, and leaves it. Their ids are those of the control plane's log."""

from __future__ import annotations

import logging

import numpy as np

from contract.process_log import printable
from data_plane.plan import NewRow, StepOutput, StepPlan

logger = logging.getLogger(__name__)

FREED, NOT_FINITE, CONSTRAINT_FAILED, SESSION_ENDED = "freed", "not_finite", "constraint_failed", "session_ended"


class RowLog:
    """The lines of one session: two for each time that a request has a row.

    The compute thread calls `begin`. Whoever hands results on calls `count`, in the order of steps; `close` follows.
    """

    def __init__(self, epoch: int, max_rows: int) -> None:
        self._epoch = epoch
        self._is_on = logger.isEnabledFor(logging.INFO)
        self._requests: dict[int, NewRow] = {}  # by row
        self._failures: dict[int, str] = {}  # by row
        num_counted = max_rows if self._is_on else 0
        self._num_tokens = np.zeros(num_counted, np.int64)  # by row
        self._num_steps = np.zeros(num_counted, np.int64)

    def begin(self, plan: StepPlan) -> None:
        """Write a line for each new row of the plan: again after a preemption or a move, and for each completion."""
        if not self._is_on:
            return
        for new in plan.new_rows:
            if new.request_id:
                logger.info(
                    "request begins request_id=%s trace_id=%s epoch=%d step_id=%d row=%d slot=%s prompt_tokens=%d "
                    "known_tokens=%d cached_tokens=%d",
                    printable(new.request_id),
                    printable(new.trace_id) or "-",
                    self._epoch,
                    plan.step_id,
                    new.row,
                    "-" if new.slot is None else new.slot,
                    new.num_prompt_tokens,
                    len(new.token_ids),
                    new.num_computed_tokens,
                )

    def count(self, plan: StepPlan, output: StepOutput) -> None:
        """Write a line for each row that the step freed, and count what the step computed for the others."""
        if not self._is_on:
            return
        for row in plan.freed_rows.tolist():
            self._end(row, FREED)
        for new in plan.new_rows:
            self._num_tokens[new.row] = self._num_steps[new.row] = 0
            if new.request_id:
                self._requests[new.row] = new
        self._num_tokens[output.rows] += 1
        self._num_steps[output.rows] += 1
        if len(prefilled := plan.prefills[:, 0]):
            self._num_steps[prefilled[~np.isin(prefilled, output.rows)]] += 1
        if len(output.failed_rows):
            broken = output.unconstrained_rows.tolist()
            for row in output.failed_rows.tolist():
                self._failures[row] = CONSTRAINT_FAILED if row in broken else NOT_FINITE

    def close(self) -> None:
        """Write a line for each row that the session's end took away."""
        for row in list(self._requests):
            self._end(row, SESSION_ENDED)

    def _end(self, row: int, reason: str) -> None:
        failure = self._failures.pop(row, reason)
        if (request := self._requests.pop(row, None)) is None:
            return
        logger.info(
            "request leaves request_id=%s trace_id=%s epoch=%d row=%d reason=%s sampled_tokens=%d steps=%d",
            printable(request.request_id),
            printable(request.trace_id) or "-",
            self._epoch,
            row,
            failure,
            self._num_tokens[row],
            self._num_steps[row],
        )
