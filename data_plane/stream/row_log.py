"""One line of the worker's log for each request that begins here, with the ids that the control plane's log has."""

from __future__ import annotations

import logging

from contract.process_log import printable
from data_plane.plan import StepPlan

logger = logging.getLogger(__name__)


def log_new_rows(plan: StepPlan, epoch: int) -> None:
    """Write a line for each new row of the plan: again after a preemption or a move, and for each completion."""
    if not plan.new_rows or not logger.isEnabledFor(logging.INFO):
        return
    for new in plan.new_rows:
        if new.request_id:
            logger.info(
                "request begins request_id=%s trace_id=%s epoch=%d step_id=%d row=%d slot=%s prompt_tokens=%d "
                "known_tokens=%d cached_tokens=%d",
                printable(new.request_id),
                printable(new.trace_id) or "-",
                epoch,
                plan.step_id,
                new.row,
                "-" if new.slot is None else new.slot,
                new.num_prompt_tokens,
                len(new.token_ids),
                new.num_computed_tokens,
            )
