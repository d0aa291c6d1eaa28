"""One step plan in the making, and what is remembered of it until its result comes.

The draft owns the token budget and the byte budget: nothing is scheduled without taking tokens from the one, and no
row begins that the other has no room for.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence as Items
from dataclasses import dataclass, field

from control_plane.scheduler.errors import ResultMismatch
from control_plane.scheduler.requests.sequence import Row, Sequence
from control_plane.scheduler.step.decode_batch import DecodeBatch
from control_plane.scheduler.step.new_rows import PLAN_BYTES, begin_row, row_bytes
from control_plane.scheduler.types import TOKEN_BYTES, NewRow, SlotUse, StepPlan, StepResult


@dataclass(slots=True)
class InFlightStep:
    """A step that was planned and whose result has not come."""

    step_id: int
    decodes: list[Row]  # ascending by row
    prefills: list[tuple[Row, int, bool]]  # (row, tokens, whether it samples) in the order of the plan
    sampled_rows: list[int]  # rows that the result must name, in its order
    ends_plan: bool = True  # the last or only step of its plan
    logprob_rows: list[int] = field(default_factory=list)  # of sampled_rows: log-probabilities must come with them
    swap_outs: list[tuple[int, int]] = field(default_factory=list)  # (block, host block) moved out before it
    spent_host_blocks: list[int] = field(default_factory=list)  # swapped in, free once its result has come


class PlanDraft:
    """What the next step will hold, within `budget` tokens."""

    def __init__(self, budget: int, block_size: int) -> None:
        self.budget = budget  # tokens left
        self._block_size = block_size
        self._num_row_bytes = 0  # of new rows
        self._prompts: set[int] = set()  # ids of the prompts of new rows, which the plan carries once each
        self.decodes = DecodeBatch([])
        self.prefills: list[tuple[Row, int, bool]] = []
        self.new_rows: list[NewRow] = []
        self.appended_blocks: list[tuple[int, int]] = []
        self.block_copies: list[tuple[int, int]] = []
        self.swap_outs: list[tuple[int, int]] = []
        self.swap_ins: list[tuple[int, int]] = []
        self.spent_host_blocks: list[int] = []
        self.fed_tokens: list[tuple[int, int]] = []

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to compute."""
        return not self.decodes and not self.prefills

    def may_begin(self, sequences: Items[Sequence]) -> bool:
        """Whether the plan has bytes left for the rows of these sequences of one request; if not, the next plan has.

        The first row of a plan may always begin.
        """
        return not self.new_rows or self._num_row_bytes + self._bytes_of(sequences) <= PLAN_BYTES

    def begin(self, row: Row, slot_generation: int, slot_uses: tuple[SlotUse, ...] = ()) -> None:
        """Begin a row; see `begin_row`."""
        self._num_row_bytes += self._bytes_of([row.sequence])
        self._prompts.add(id(row.sequence.request.prompt_token_ids))
        self.new_rows.append(begin_row(row, slot_generation, slot_uses))

    def _bytes_of(self, sequences: Items[Sequence]) -> int:
        prompt = sequences[0].request.prompt_token_ids
        prompt_bytes = 0 if id(prompt) in self._prompts else TOKEN_BYTES * len(prompt)
        return prompt_bytes + sum(row_bytes(sequence, self._block_size) for sequence in sequences)

    def prefill(self, row: Row) -> None:
        """Schedule as much of a row's prefill as the budget allows, at least one token."""
        num_tokens = min(self.budget, row.prefill_end - row.num_planned)
        assert num_tokens > 0, f"request {row.sequence.request_id} has no prefill to plan, or the budget is spent"
        self.budget -= num_tokens
        row.plan_prefill(num_tokens)
        self.prefills.append((row, num_tokens, row.is_decoding))

    def feed(self) -> None:
        """Note the tokens that host-fed rows are fed. Need not be called if no row is host-fed."""
        self.fed_tokens = [
            (row.row_idx, row.sequence.generated[-1]) for row in self.decodes.by_idx if row.sequence.is_host_fed
        ]

    def finish(self, step_id: int, freed_rows: list[int], num_steps: int) -> tuple[StepPlan, list[InFlightStep]]:
        """The plan, and what to keep of each of its steps; those after the first only decode."""
        decodes, decode_rows = self.decodes.by_idx, self.decodes.row_idxs
        sampled_rows = decode_rows + [row.row_idx for row, _, samples in self.prefills if samples]
        plan = StepPlan(
            step_id=step_id,
            decode_rows=decode_rows,
            prefills=[(row.row_idx, num_tokens) for row, num_tokens, _ in self.prefills],
            new_rows=self.new_rows,
            appended_blocks=self.appended_blocks,
            freed_rows=freed_rows,
            block_copies=self.block_copies,
            swap_outs=self.swap_outs,
            swap_ins=self.swap_ins,
            fed_tokens=self.fed_tokens,
            num_steps=num_steps,
        )
        steps = [InFlightStep(step_id, decodes, self.prefills, sampled_rows, num_steps == 1)]
        steps[0].swap_outs, steps[0].spent_host_blocks = self.swap_outs, self.spent_host_blocks
        for idx in range(1, num_steps):
            steps.append(InFlightStep(step_id + idx, decodes, [], sampled_rows, idx == num_steps - 1))
        return plan, steps


def note_logprobs(steps: list[InFlightStep]) -> None:
    """Note the rows whose results must bring log-probabilities. Need not be called if there are none."""
    for step in steps:
        sampling = [*step.decodes, *(row for row, _, samples in step.prefills if samples)]
        step.logprob_rows = [row.row_idx for row in sampling if row.sequence.sampling.num_logprobs is not None]


def check_result(in_flight: deque[InFlightStep], result: StepResult) -> None:
    """Raise ResultMismatch unless the result is that of the oldest step in flight, row by row."""
    if not in_flight:
        raise ResultMismatch(f"step {result.step_id}: a result came, but no step is in flight")
    step = in_flight[0]
    if result.step_id != step.step_id:
        raise ResultMismatch(f"step {result.step_id}: a result came, but the oldest step in flight is {step.step_id}")
    expected = step.sampled_rows
    if result.failed_rows:
        failed = set(result.failed_rows)
        if not failed <= set(expected):
            raise ResultMismatch(
                f"step {result.step_id}: failed rows {sorted(failed)} are not among the rows that sample: {expected}"
            )
        expected = [row_idx for row_idx in expected if row_idx not in failed]
    if result.waiting_rows:
        if not result.waiting_rows <= set(expected):
            raise ResultMismatch(
                f"step {result.step_id}: waiting rows {sorted(result.waiting_rows)} are not among the rows that "
                f"sample and did not fail: {expected}"
            )
        expected = [row_idx for row_idx in expected if row_idx not in result.waiting_rows]
    if result.rows != expected or len(result.token_ids) != len(expected):
        raise ResultMismatch(
            f"step {result.step_id}: {len(result.token_ids)} tokens came for rows {result.rows}; expected is a token "
            f"for each of rows {expected}"
        )
    _check_extras(step, result)


def _check_extras(step: InFlightStep, result: StepResult) -> None:
    """Raise ResultMismatch if vectors or log-probabilities of sampled tokens lack, or more than due is of a prompt.

    Less than is due of a prompt is not a mismatch: what is not finite is left out.
    """
    for row, _, samples in step.prefills:
        if samples and row.sequence.request.pooling is not None and not _has_vector(row, result):
            raise ResultMismatch(f"step {result.step_id}: row {row.row_idx} came without its vector")
    for row_idx in step.logprob_rows:
        if row_idx not in result.logprobs and row_idx not in result.failed_rows and row_idx not in result.waiting_rows:
            raise ResultMismatch(f"step {result.step_id}: row {row_idx} came without its log-probabilities")
    for row, num_tokens, _ in step.prefills:
        if not row.sequence.awaits_prompt_logprobs or row.sequence.is_ended:
            continue
        num_due = num_prompt_logprobs_due(row, num_tokens)
        num_returned = len(result.prompt_logprobs.get(row.row_idx, ()))
        if num_returned > num_due:
            raise ResultMismatch(
                f"step {result.step_id}: row {row.row_idx} came with log-probabilities of {num_returned} prompt "
                f"tokens; {num_due} are due"
            )


def _has_vector(row: Row, result: StepResult) -> bool:
    return row.row_idx in result.pooled or row.row_idx in result.failed_rows


def num_prompt_logprobs_due(row: Row, num_tokens: int) -> int:
    """Prompt tokens whose log-probabilities come with the next `num_tokens` computed tokens of the row."""
    start = row.num_computed + 1  # computing a token gives the log-probabilities of the token after it
    return max(0, min(start + num_tokens, len(row.sequence.request.prompt_token_ids)) - start)
