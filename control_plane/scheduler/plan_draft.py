"""One step plan in the making, and what is remembered of it until its result comes.

The draft owns the token budget: nothing is scheduled without taking tokens from it.
"""

from __future__ import annotations

from dataclasses import dataclass
from operator import attrgetter

from control_plane.scheduler.sequence import Sequence
from control_plane.scheduler.types import NewRow, ScheduledRow, StepPlan

_row = attrgetter("row")


@dataclass(slots=True)
class Flight:
    """A plan that is not answered."""

    step_id: int
    decodes: list[Sequence]  # ascending by row
    prefills: list[tuple[Sequence, int, bool]]  # (sequence, tokens, whether it samples) in the order of the plan
    sampled_rows: list[int]  # rows that the result must name, in its order


class PlanDraft:
    """What the next step will hold, within `budget` tokens."""

    def __init__(self, budget: int) -> None:
        self.budget = budget  # tokens left
        self.decodes: list[Sequence] = []
        self.prefills: list[tuple[Sequence, int, bool]] = []
        self.new_rows: list[NewRow] = []
        self.appended_blocks: list[tuple[int, int]] = []

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to compute."""
        return not self.decodes and not self.prefills

    def prefill(self, sequence: Sequence) -> None:
        """Schedule as much of a sequence's prefill as the budget allows, at least one token."""
        num_tokens = min(self.budget, sequence.prefill_end - sequence.num_planned)
        assert num_tokens > 0, f"request {sequence.request.request_id} has no prefill to plan, or the budget is spent"
        self.budget -= num_tokens
        sequence.num_planned += num_tokens
        sequence.num_in_flight += 1
        sequence.is_decoding = sequence.num_planned == sequence.prefill_end
        self.prefills.append((sequence, num_tokens, sequence.is_decoding))

    def finish(self, step_id: int, freed_rows: list[int]) -> tuple[StepPlan, Flight]:
        """The plan, and what to keep of it."""
        self.decodes.sort(key=_row)
        scheduled = [sequence.decode_row for sequence in self.decodes if sequence.decode_row is not None]
        scheduled += [ScheduledRow(sequence.row, n, False) for sequence, n, _ in self.prefills]
        sampled_rows = [sequence.row for sequence in self.decodes]
        sampled_rows += [sequence.row for sequence, _, samples in self.prefills if samples]
        plan = StepPlan(
            step_id=step_id,
            scheduled=scheduled,
            new_rows=self.new_rows,
            appended_blocks=self.appended_blocks,
            freed_rows=freed_rows,
        )
        return plan, Flight(step_id, self.decodes, self.prefills, sampled_rows)
