"""How far plans run ahead of their results: the one place for that rule. Pure.

A decoding row's last token stays on the worker and is fed back there, so its next step can be planned before the token
is known here. Three bounds hold.

1. A plan is made while at most (plan_depth - 1) * max_steps steps are unanswered; a plan stands for at most max_steps.
   So never more than plan_depth * max_steps are, and as the next plan leaves, the worker has that many less one plan's
   to do: time that hides the plan's way. max_steps is 1 unless the fleet measured that plan_depth alone is too little.
2. A plan stands for several steps only where nothing could be decided between them: every row decodes in each of
   them, none reaches its length before the last, their blocks can be had without preemption, and nobody waits who
   could be admitted meanwhile. Elsewhere the same room is used by plans of one step.
3. A row whose next token is chosen here, not on the worker (stepwise), is planned one step late: its max_planned are
   the tokens known here.

What the worker computes for a row after its stop token is wasted: at most plan_depth * max_steps - 1 tokens.
"""

from __future__ import annotations

from control_plane.scheduler.requests.sequence import Sequence, SequenceState
from control_plane.scheduler.step.plan_draft import PlanDraft
from control_plane.scheduler.step.roster import Roster


def may_plan(num_unanswered_steps: int, plan_depth: int, max_steps: int) -> bool:
    """Whether another plan may be made (bound 1)."""
    return num_unanswered_steps <= (plan_depth - 1) * max_steps


def repeat(draft: PlanDraft, roster: Roster, max_steps: int) -> int:
    """Steps that the draft's plan stands for (bound 2), the first included; books the others on its sequences."""
    if max_steps == 1 or draft.prefills or not draft.decodes:
        return 1
    num_more = min(
        max_steps - 1, min(sequence.max_planned - sequence.num_planned for sequence in draft.decodes.sequences)
    )
    if num_more == 0 or not _is_settled(draft, roster):
        return 1
    short = _blocks_short(draft, roster.block_size, num_more)
    while sum(num_blocks for _, num_blocks in short) > roster.pool.num_available:
        num_more -= 1
        short = _blocks_short(draft, roster.block_size, num_more)
    for sequence in draft.decodes.sequences:
        sequence.num_planned += num_more
        sequence.num_in_flight += num_more
    for sequence, num_blocks in short:
        blocks = roster.pool.take(num_blocks)
        sequence.block_ids += blocks
        draft.appended_blocks += [(sequence.row, block_id) for block_id in blocks]
    roster.regroup()  # tables grew, and some may be planned to their end
    return 1 + num_more


def _is_settled(draft: PlanDraft, roster: Roster) -> bool:
    """Whether nothing could be decided otherwise in the steps that follow, but for what comes from outside.

    No row of the draft has reached its length.
    """
    is_awaited = roster.waiting.is_awaited or roster.swap.peek() is not None
    if is_awaited and (roster.rows.num_free > 0 or roster.num_draining > 0):
        return False
    num_open = 0  # rows that go on decoding
    for sequence in roster.running:
        if not sequence.is_decoding or sequence.is_stepwise:
            return False
        if sequence.state is SequenceState.RUNNING and not sequence.group.is_paused:
            if sequence.num_planned < sequence.max_planned:
                num_open += 1
            elif is_awaited:
                return False  # all its tokens are planned, and somebody waits for its row
    return num_open == len(draft.decodes)  # else one is short of a block or of budget


def _blocks_short(draft: PlanDraft, block_size: int, num_more: int) -> list[tuple[Sequence, int]]:
    """Who lacks how many blocks for so many tokens beyond those planned."""
    return [
        (sequence, num_blocks)
        for sequence in draft.decodes.sequences
        if (num_blocks := -(-(sequence.num_planned + num_more) // block_size) - len(sequence.block_ids)) > 0
    ]
