"""One step plan in the making, and what is remembered of it until its result comes.

The draft owns the token budget and the byte budget: nothing is scheduled without taking tokens from the one, and no
row begins that the other has no room for.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence as Items
from dataclasses import dataclass, field

from control_plane.scheduler.errors import ResultMismatch
from control_plane.scheduler.requests.sequence import Sequence
from control_plane.scheduler.step.decode_batch import DecodeBatch
from control_plane.scheduler.step.new_rows import PLAN_BYTES, begin_row, row_bytes
from control_plane.scheduler.types import TOKEN_BYTES, NewRow, StepPlan, StepResult


@dataclass(slots=True)
class Flight:
    """A step that is planned and not answered."""

    step_id: int
    decodes: list[Sequence]  # ascending by row
    prefills: list[tuple[Sequence, int, bool]]  # (sequence, tokens, whether it samples) in the order of the plan
    sampled_rows: list[int]  # rows that the result must name, in its order
    ends_plan: bool = True  # the last or only step of its plan
    logprob_rows: list[int] = field(default_factory=list)  # of sampled_rows: log-probabilities are to come with them
    swap_outs: list[tuple[int, int]] = field(default_factory=list)  # (block, host block) moved out before it
    spent_host_blocks: list[int] = field(default_factory=list)  # swapped in, free once it is answered


class PlanDraft:
    """What the next step will hold, within `budget` tokens."""

    def __init__(self, budget: int, block_size: int) -> None:
        self.budget = budget  # tokens left
        self._block_size = block_size
        self._num_row_bytes = 0  # of new rows
        self._prompts: set[int] = set()  # ids of the prompts of new rows, which the plan carries once each
        self.decodes = DecodeBatch([])
        self.prefills: list[tuple[Sequence, int, bool]] = []
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
        """Whether the plan has bytes left for the rows of these sequences of one request; without others it always has.

        Where it has not, they begin in the next plan.
        """
        return not self.new_rows or self._num_row_bytes + self._bytes_of(sequences) <= PLAN_BYTES

    def begin(self, sequence: Sequence, slot_generation: int) -> None:
        """Begin the row of a sequence; see `begin_row`."""
        self._num_row_bytes += self._bytes_of([sequence])
        self._prompts.add(id(sequence.request.prompt_token_ids))
        self.new_rows.append(begin_row(sequence, slot_generation))

    def _bytes_of(self, sequences: Items[Sequence]) -> int:
        prompt = sequences[0].request.prompt_token_ids
        prompt_bytes = 0 if id(prompt) in self._prompts else TOKEN_BYTES * len(prompt)
        return prompt_bytes + sum(row_bytes(sequence, self._block_size) for sequence in sequences)

    def prefill(self, sequence: Sequence) -> None:
        """Schedule as much of a sequence's prefill as the budget allows, at least one token."""
        num_tokens = min(self.budget, sequence.prefill_end - sequence.num_planned)
        assert num_tokens > 0, f"request {sequence.request.request_id} has no prefill to plan, or the budget is spent"
        self.budget -= num_tokens
        sequence.num_planned += num_tokens
        sequence.num_in_flight += 1
        sequence.is_decoding = sequence.num_planned == sequence.prefill_end
        self.prefills.append((sequence, num_tokens, sequence.is_decoding))

    def feed(self) -> None:
        """Say which tokens stepwise rows are fed; not called where none decodes."""
        self.fed_tokens = [(s.row, s.generated[-1]) for s in self.decodes.by_row if s.is_stepwise]

    def finish(self, step_id: int, freed_rows: list[int], num_steps: int) -> tuple[StepPlan, list[Flight]]:
        """The plan, and what to keep of each of its steps; those after the first only decode."""
        decodes, decode_rows = self.decodes.by_row, self.decodes.rows
        sampled_rows = decode_rows + [sequence.row for sequence, _, samples in self.prefills if samples]
        plan = StepPlan(
            step_id=step_id,
            decode_rows=decode_rows,
            prefills=[(sequence.row, num_tokens) for sequence, num_tokens, _ in self.prefills],
            new_rows=self.new_rows,
            appended_blocks=self.appended_blocks,
            freed_rows=freed_rows,
            block_copies=self.block_copies,
            swap_outs=self.swap_outs,
            swap_ins=self.swap_ins,
            fed_tokens=self.fed_tokens,
            num_steps=num_steps,
        )
        flights = [Flight(step_id, decodes, self.prefills, sampled_rows, num_steps == 1)]
        flights[0].swap_outs, flights[0].spent_host_blocks = self.swap_outs, self.spent_host_blocks
        for idx in range(1, num_steps):
            flights.append(Flight(step_id + idx, decodes, [], sampled_rows, idx == num_steps - 1))
        return plan, flights


def note_logprobs(flights: list[Flight]) -> None:
    """Keep which rows are to be answered with log-probabilities; not called where none is."""
    for flight in flights:
        sampling = [*flight.decodes, *(sequence for sequence, _, samples in flight.prefills if samples)]
        flight.logprob_rows = [s.row for s in sampling if s.sampling.num_logprobs is not None]


def check_answer(flights: deque[Flight], result: StepResult) -> None:
    """Raise ResultMismatch unless the result answers the oldest of these plans, row by row."""
    if not flights:
        raise ResultMismatch(f"a result for step {result.step_id} came, but no plan is unanswered")
    flight = flights[0]
    if result.step_id != flight.step_id:
        raise ResultMismatch(f"a result for step {result.step_id} came, step {flight.step_id} is the oldest unanswered")
    expected = flight.sampled_rows
    if result.failed_rows:
        failed = set(result.failed_rows)
        if not failed <= set(expected):
            raise ResultMismatch(f"step {result.step_id}: failed rows {sorted(failed)} are not all rows that sample")
        expected = [row for row in expected if row not in failed]
    if result.rows != expected or len(result.token_ids) != len(expected):
        raise ResultMismatch(
            f"step {result.step_id}: {len(result.token_ids)} tokens for rows {result.rows}, expected are {expected}"
        )
    _check_logprobs(flight, result)


def _check_logprobs(flight: Flight, result: StepResult) -> None:
    """Raise ResultMismatch unless sampled tokens come with their log-probabilities, and prompts with no more than due.

    Less than is due of a prompt is no mismatch: what is not finite is left out.
    """
    for row in flight.logprob_rows:
        if row not in result.logprobs and row not in result.failed_rows:
            raise ResultMismatch(f"step {result.step_id}: no log-probabilities for row {row}")
    for sequence, num_tokens, _ in flight.prefills:
        if not sequence.tells_prompt or sequence.is_ended:
            continue
        num_due = num_prompt_logprobs_due(sequence, num_tokens)
        num_told = len(result.prompt_logprobs.get(sequence.row, ()))
        if num_told > num_due:
            raise ResultMismatch(
                f"step {result.step_id}: row {sequence.row} tells of {num_told} prompt tokens where {num_due} are due"
            )


def num_prompt_logprobs_due(sequence: Sequence, num_tokens: int) -> int:
    """Prompt tokens that a sequence is to tell of, for its next `num_tokens` computed ones; it tells its prompt."""
    start = sequence.num_computed + 1  # the first computed token tells of the one that follows
    return max(0, min(start + num_tokens, len(sequence.request.prompt_token_ids)) - start)
