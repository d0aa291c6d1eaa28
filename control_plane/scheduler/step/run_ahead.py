"""How far plans run ahead of their results: the one place for that rule. Pure.

A decoding row's last token stays on the worker and is fed back there, so its next step can be planned before the token
is known here. Three bounds hold.

1. A plan is made while at most (plan_depth - 1) * max_steps steps are in flight; a plan stands for at most max_steps
   steps. Hence at most plan_depth * max_steps steps are in flight. When the next plan is sent, the worker still has
   (plan_depth - 1) * max_steps steps to run, which hides the time that the plan needs to arrive. max_steps is 1 unless
   the fleet measured that plan_depth alone is too little.
2. A plan stands for several steps only if nothing could be decided between them: every row decodes in each of them,
   none reaches its length before the last, their blocks can be had without preemption, and no request waits that
   could be admitted meanwhile. Otherwise the same room is used by plans of one step.
3. A row whose next token is chosen here, not on the worker (host-fed), is planned one step late: its max_planned are
   the tokens known here.

What the worker computes for a row after its stop token is wasted: at most plan_depth * max_steps - 1 tokens.
"""

from __future__ import annotations

from control_plane.scheduler.requests.sequence import Row
from control_plane.scheduler.requests.states import SequenceState
from control_plane.scheduler.step.plan_draft import PlanDraft
from control_plane.scheduler.step.worker_state import WorkerState


def may_plan(num_steps_in_flight: int, plan_depth: int, max_steps: int) -> bool:
    """Whether another plan may be made (bound 1)."""
    return num_steps_in_flight <= (plan_depth - 1) * max_steps


def repeat(draft: PlanDraft, worker: WorkerState, max_steps: int) -> int:
    """Steps that the draft's plan stands for (bound 2), the first included; plans the others on the draft's rows."""
    if max_steps == 1 or draft.prefills or not draft.decodes:
        return 1
    rows = draft.decodes.rows
    num_more = min(max_steps - 1, min(row.sequence.max_planned - row.num_planned for row in rows))
    if num_more == 0 or not _is_settled(draft, worker):
        return 1
    size = worker.limits.block_size
    short = _blocks_short(rows, size, num_more)
    while sum(num_blocks for _, num_blocks in short) > worker.pool.num_available:
        num_more -= 1
        short = _blocks_short(rows, size, num_more)
    for row in rows:
        row.plan_decodes(num_more)
    for row, num_blocks in short:
        blocks = worker.pool.take(num_blocks)
        row.add_blocks(blocks)
        draft.appended_blocks += [(row.row_idx, block_id) for block_id in blocks]
    worker.rows.regroup()  # tables grew, and some may be planned to their end
    return 1 + num_more


def _is_settled(draft: PlanDraft, worker: WorkerState) -> bool:
    """Whether the steps that follow would be planned the same way, unless something comes from outside.

    No row of the draft has reached its length.
    """
    is_awaited = worker.queues.is_awaited
    if is_awaited and (worker.rows.free.num_free > 0 or worker.rows.num_leaving > 0):
        return False
    num_open = 0  # rows that go on decoding
    for row in worker.rows.held:
        sequence = row.sequence
        if not row.is_decoding or sequence.is_host_fed:
            return False
        if row.state is SequenceState.RUNNING and not sequence.group.is_paused:
            if row.num_planned < sequence.max_planned:
                num_open += 1
            elif is_awaited:
                return False  # all its tokens are planned, and a request waits for its row
    return num_open == len(draft.decodes)  # else a row is short of a block or of budget


def _blocks_short(rows: list[Row], block_size: int, num_more: int) -> list[tuple[Row, int]]:
    """Rows that lack blocks for `num_more` tokens beyond those planned, and how many blocks they lack."""
    return [
        (row, num_blocks)
        for row in rows
        if (num_blocks := -(-(row.num_planned + num_more) // block_size) - len(row.block_ids)) > 0
    ]
