"""Speculative decoding of the steps of one plan: drafts of each row's next tokens, and the results that came early.

A plan of several steps grants each row that many tokens, blocks included. One pass verifies drafts for the steps that
follow; what it accepts is kept here and returned as the results of these steps. At the end of a plan nothing is kept:
rows, KV and results are those of an engine that does not speculate.

Mode "ngram" drafts whenever there is something to draft. Mode "auto" drafts where that makes the plan faster, by the
measured times of passes and by the shares of drafts that the rows had accepted.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from data_plane.constraints.rows import ConstraintRows
from data_plane.engine.batch import Drafts, PassOutput
from data_plane.engine.rows import Int64Array, Rows
from data_plane.engine.speculative.draft_passes import DraftPasses
from data_plane.engine.speculative.draft_row import DraftRow, EarlyToken
from data_plane.engine.speculative.pass_costs import PassCosts
from data_plane.engine.steps_under_way import StepUnderWay
from data_plane.plan import Int32Array, NewRow, StepOutput, StepPlan
from data_plane.spans import span
from kernels.devices import upload

logger = logging.getLogger(__name__)

MANY_STEPS = 256  # decode steps without a plan of several steps, after which a warning says that nothing is drafted


@dataclass(frozen=True, slots=True)
class _Awaited:
    """A step whose tokens the rows do not know yet."""

    step: StepUnderWay
    rows: list[DraftRow | None]  # that sampled, in the order of the tokens; None: it never drafts
    has_adapters: bool | None  # of a step that only decodes; None: the time of the step says nothing
    decided_s: float  # the moment at which it was clear that it verifies no drafts


class Speculation:
    """The rows of an engine that drafts, and the engine's parts that a pass needs."""

    def __init__(
        self,
        rows: Rows,
        constraints: ConstraintRows,
        *,
        max_step_tokens: int,
        most_drafts: int,
        costs: PassCosts | None,
        passes: DraftPasses,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """`most_drafts`: of a pass, which keeps their logits. `costs` decide whether rows draft; None: all do."""
        self._engine_rows = rows
        self._constraints = constraints
        self._max_step_tokens = max_step_tokens
        self._most_drafts = most_drafts
        self._costs = costs
        self._clock = clock
        self._declined_until = -1  # last step of the plan in which nothing is drafted any more
        self._is_first = self._ends_plan = True  # whether the latest step was its plan's first, or its last
        self._steps_left = MANY_STEPS  # until a warning; 0: none is needed any more
        self._passes = passes
        self._rows: dict[int, DraftRow] = {}
        self._awaited: deque[_Awaited] = deque()
        # Of these the tokens have come. The thread that returns results notes the time after that.
        self._untimed: deque[_Awaited] = deque()
        self._decided_s = 0.0  # the moment at which it was clear that the latest step verifies no drafts
        self._num_drafted = 0  # of the step
        self._num_accepted = 0  # of these
        self.totals = (0, 0)  # both since the start

    def add(self, new: NewRow) -> None:
        """Begin a row. Rows whose tokens are chosen elsewhere, or that return vectors, never draft."""
        if new.is_host_fed or new.pooling is not None:
            return
        tokens = np.zeros(max(2 * len(new.token_ids), 64), dtype=np.int32)
        tokens[: len(new.token_ids)] = new.token_ids
        self._rows[new.row] = DraftRow(tokens, len(new.token_ids))

    def free(self, rows: Int32Array) -> None:
        """End rows."""
        for row in rows.tolist():
            self._rows.pop(row, None)
        if not self._rows:
            self._declined_until = -1

    def clear(self) -> None:
        """End every row."""
        self._rows.clear()
        self._awaited.clear()
        self._untimed.clear()
        self._declined_until = -1
        self._is_first = self._ends_plan = True

    def expect(self, step: StepUnderWay, *, only_decodes: bool) -> None:
        """Rows sample a token each in a step that was submitted. `catch_up` takes the tokens."""
        rows = [self._rows.get(row) for row in step.sampled.tolist()]
        has_adapters = self._has_adapters(step.sampled) if only_decodes else None
        self._awaited.append(_Awaited(step, rows, has_adapters, self._decided_s))

    def catch_up(self, *, waits: bool) -> None:
        """Take the tokens of submitted steps that have come, or with `waits` of all of them."""
        while self._awaited and (waits or self._awaited[0].step.copy.is_done()):
            found = self._awaited.popleft()
            token_ids = found.step.copy.read()[0].tolist()
            for state, token_id in zip(found.rows, token_ids, strict=True):
                if state is not None:
                    state.append(token_id)
            if found.has_adapters is not None:
                self._untimed.append(found)
        self._note_times()

    def _note_times(self) -> None:
        """Give the costs the times of the steps that have one by now, in order."""
        while self._untimed:
            timed = self._untimed[0]
            if (time_s := timed.step.time_since(timed.decided_s)) is None:
                return
            self._untimed.popleft()
            if self._costs is not None and timed.has_adapters is not None:
                self._costs.observe(len(timed.rows), has_adapters=timed.has_adapters, time_s=time_s)

    def note(self, rows: Int64Array, token_ids: Int32Array) -> None:
        """Rows sampled a token each."""
        self.catch_up(waits=True)
        for row, token_id in zip(rows.tolist(), token_ids.tolist(), strict=True):
            if (state := self._rows.get(row)) is not None:
                state.append(token_id)

    def step(self, plan: StepPlan, decoding: Int64Array) -> StepOutput | None:
        """The results of the step: those that came early, or those of a pass that verifies drafts for later steps.

        None where the step has neither: it is computed as any other, and has no results that came early.
        """
        self.catch_up(waits=False)
        result = self._step(plan, decoding)
        self._decided_s = self._clock()
        return result

    def _step(self, plan: StepPlan, decoding: Int64Array) -> StepOutput | None:
        if len(plan.prefills) or len(decoding) == 0 or any(row not in self._rows for row in decoding.tolist()):
            return None
        if self._steps_left:
            self._look_for_room(plan)
        self._num_drafted = self._num_accepted = 0
        self._is_first, self._ends_plan = self._ends_plan, plan.num_more == 0
        early = self._num_early(decoding)
        if (early == 0).any():
            has_room = early <= plan.num_more  # the others have the results of all steps of the plan
            rows, most = decoding[has_room], plan.num_more - early[has_room]
            drafts = self._drafts(plan, rows, most)
            if len(drafts.token_ids) == 0 and not early.any():
                return None
            self._pass(rows, drafts)
        return self._take(plan, decoding)

    def observe(self, rows: Int64Array, num_tokens: int, time_s: float, *, is_verifying: bool = False) -> None:
        """A pass of these decoding rows, and of nothing else, took this long."""
        if self._costs is not None:
            has_adapters = self._has_adapters(rows)
            self._costs.observe(num_tokens, has_adapters=has_adapters, time_s=time_s, is_verifying=is_verifying)

    def _look_for_room(self, plan: StepPlan) -> None:
        """Warn once where plans leave no room for drafts: the flag would change nothing, and nothing would say so."""
        self._steps_left = 0 if plan.num_more else self._steps_left - 1
        if not plan.num_more and not self._steps_left:
            logger.warning(
                "no drafts: each of the first %d decode steps had a plan of its own; give the control plane "
                "--min-plan-steps 4",
                MANY_STEPS,
            )

    def _take(self, plan: StepPlan, decoding: Int64Array) -> StepOutput:
        """The earliest result of each row. A row that has none sits out the step."""
        self.totals = self.totals[0] + self._num_drafted, self.totals[1] + self._num_accepted
        has_result = self._num_early(decoding) > 0
        numbers, waiting = decoding[has_result].astype(np.int32), decoding[~has_result].astype(np.int32)
        taken = [self._rows[row].early.popleft() for row in numbers.tolist()]
        failed = np.array([token.is_failed for token in taken], dtype=np.bool_)
        tokens = np.array([token.token_id for token in taken], dtype=np.int32)
        return StepOutput(
            plan.step_id,
            numbers[~failed],
            tokens[~failed],
            numbers[failed],
            0,
            [token.logprobs for token in taken if token.logprobs is not None],
            unconstrained_rows=numbers[[token.is_unconstrained for token in taken]],
            waiting_rows=waiting,
            num_drafted=self._num_drafted,
            num_accepted=self._num_accepted,
        )

    def _num_early(self, rows: Int64Array) -> Int64Array:
        return np.array([len(self._rows[row].early) for row in rows.tolist()], dtype=np.int64)

    def _has_adapters(self, rows: Int64Array) -> bool:
        return bool((self._engine_rows.slot[rows] >= 0).any())

    def _drafts(self, plan: StepPlan, decoding: Int64Array, most: Int64Array) -> Drafts:
        """At most `most` [n] drafts of each row; none at all where the costs say that they would not pay.

        A pass that verifies drafts needs every mask at once, so that none begins with a row whose grammar may be slow.
        """
        nothing = Drafts(np.zeros(len(decoding), dtype=np.int64), np.zeros(0, dtype=np.int64))
        if plan.num_more == 0 or plan.step_id <= self._declined_until:
            return nothing
        has_adapters = self._has_adapters(decoding)
        if self._costs is not None and not self._costs.can_gain(
            len(decoding), plan.num_more + 1, has_adapters=has_adapters
        ):
            self._declined_until = plan.step_id + plan.num_more
            return nothing
        if not self._constraints.may_draft(decoding):
            return nothing
        if self._awaited and not self._is_first:
            return nothing  # to wait in every step for the one before would cost more than drafts of a part of a plan
        self.catch_up(waits=True)
        if self._costs is not None:
            for row in decoding.tolist():
                self._rows[row].compare_tried()
        rows = self._engine_rows
        room = rows.num_row_blocks[decoding] * rows.block_size - rows.num_computed[decoding] - 1
        needs_all = self._costs is not None and not self._costs.can_gain_beside(
            len(decoding), plan.num_more + 1, has_adapters=has_adapters
        )
        drafts = self._propose(decoding, np.minimum(most, room), needs_all=needs_all)
        fitting = min(self._most_drafts, self._max_step_tokens - len(decoding))
        if len(drafts.token_ids) > fitting:
            drafts = drafts.first(fitting // len(decoding))
        if self._costs is not None and len(drafts.token_ids):
            shares = np.array([self._rows[row].share for row in decoding.tolist()])
            if not self._costs.gains(drafts.counts, most, shares, has_adapters=has_adapters):
                self._declined_until = plan.step_id + plan.num_more
                self._remember(decoding, drafts)
                return nothing
        return drafts

    def _remember(self, decoding: Int64Array, drafts: Drafts) -> None:
        """Keep drafts that are not verified, so that shares are measured without any cost."""
        ends = np.cumsum(drafts.counts)
        for row, end, count in zip(decoding.tolist(), ends.tolist(), drafts.counts.tolist(), strict=True):
            state = self._rows[row]
            state.tried = state.num_tokens, drafts.token_ids[end - count : end].tolist()

    def _pass(self, decoding: Int64Array, drafts: Drafts) -> None:
        """One pass of the rows with these drafts; its results are kept."""
        started_s = self._clock()
        rows = self._engine_rows
        with span("forward"):
            logits = self._passes.logits(decoding, drafts)
        with span("sample"):
            self._verify(decoding, drafts, logits)
        # What was rejected is written again by the plan's later steps, before anything may share it. A row that sits
        # these out writes it later, before anything reads it.
        rows.num_computed[decoding] = rows.num_known[decoding] - 1
        num_tokens = len(decoding) + len(drafts.token_ids)
        self.observe(decoding, num_tokens, self._clock() - started_s, is_verifying=True)

    def _propose(self, rows: Int64Array, most: Int64Array, *, needs_all: bool) -> Drafts:
        """What a row's grammar forces, else what followed its last tokens before; at most `most` [n] tokens each.

        With `needs_all` none at all where one row has none: the search for the others is saved.
        """
        forced = self._constraints.forced(rows) if (most > 0).any() else {}
        found: list[list[int]] = []
        for row, limit in zip(rows.tolist(), most.tolist(), strict=True):
            found.append((forced.get(row) or self._rows[row].look_up())[:limit] if limit > 0 else [])
            if needs_all and limit > 0 and not found[-1]:
                found = [[] for _ in rows]
                break
        counts = np.array([len(drafts) for drafts in found], dtype=np.int64)
        return Drafts(counts, np.array([token for drafts in found for token in drafts], dtype=np.int64))

    def _verify(self, decoding: Int64Array, drafts: Drafts, logits: torch.Tensor) -> None:
        """Sample each position as a step of its own would, as long as a row's drafts are what was sampled.

        Rows are sampled at all positions at once where the next position needs nothing that is known only after this
        one. A row whose mask is not ready samples no further. If it has sampled nothing in this pass, it sits out the
        step.
        """
        num_tried = drafts.counts.copy()
        is_free = self._passes.are_free(decoding)
        num_accepted = np.zeros(len(decoding), dtype=np.int64)
        starts = drafts.starts
        if is_free.any():
            free = np.flatnonzero(is_free)
            num_accepted[free] = self._verify_at_once(decoding[free], drafts.of(free), starts[free], logits)
        first = np.cumsum(drafts.counts) - drafts.counts  # place of a row's first draft
        alive = np.flatnonzero(~is_free)
        position = 0
        while len(alive):
            masks = self._constraints.collect(decoding[alive], is_alone=False, is_verifying=True)
            if masks is not None and masks.waiting:
                num_tried[alive[masks.waiting]] = position
                self._engine_rows.sit_out(decoding[alive[masks.waiting]])
                alive = np.delete(alive, masks.waiting)
                if not len(alive):
                    break
            sampled = decoding[alive]
            at = starts[alive] + position
            tokens = self._keep(sampled, self._passes.sample(sampled, logits[upload(at, logits.device)], masks))
            has_draft = position < drafts.counts[alive]
            alive, tokens = alive[has_draft], tokens[has_draft]
            alive = alive[drafts.token_ids[first[alive] + position] == tokens]
            num_accepted[alive] += 1
            position += 1
        for row, drafted, accepted in zip(decoding.tolist(), num_tried.tolist(), num_accepted.tolist(), strict=True):
            if drafted:
                self._rows[row].note_verified(accepted, drafted)
        self._num_drafted += len(drafts.token_ids)
        self._num_accepted += int(num_accepted.sum())

    def _verify_at_once(self, rows: Int64Array, drafts: Drafts, starts: Int64Array, logits: torch.Tensor) -> Int64Array:
        """Sample every position of these rows, whose tokens begin at `starts` [n] in the pass, and keep the tokens up
        to the first that is not its draft. How many drafts of each were right."""
        counts, ahead, begins = drafts.counts + 1, drafts.ahead, drafts.starts
        drawn = self._passes.draw(np.repeat(rows, counts), ahead, logits, np.repeat(starts, counts) + ahead)
        has_draft = ahead < np.repeat(drafts.counts, counts)
        is_wrong = ~has_draft
        is_wrong[has_draft] = (drawn.token_ids[has_draft] != drafts.token_ids) | ~drawn.is_finite[has_draft]
        num_right: Int64Array = np.minimum.reduceat(np.where(is_wrong, ahead, len(ahead)), begins)
        self._passes.keep(drawn, rows, num_right + 1, begins + num_right)
        for row, begin, count in zip(rows.tolist(), begins.tolist(), (num_right + 1).tolist(), strict=True):
            state = self._rows[row]
            token_ids, finite = (
                values[begin : begin + count].tolist() for values in (drawn.token_ids, drawn.is_finite)
            )
            for token_id, is_finite in zip(token_ids, finite, strict=True):
                state.append(token_id)
                state.early.append(EarlyToken(token_id, is_failed=not is_finite))
        return num_right

    def _keep(self, sampled: Int64Array, output: PassOutput) -> Int64Array:
        """Keep a token of each sampled row for the next step that has none. Their ids, -1 for rows that failed."""
        token_ids = dict(zip(output.rows.tolist(), output.token_ids.tolist(), strict=True))
        logprobs = {entry.row: entry for entry in output.sampled_logprobs}
        unconstrained = set(output.unconstrained_rows.tolist())
        for row in sampled.tolist():
            is_failed = row not in token_ids
            self._rows[row].early.append(
                EarlyToken(token_ids.get(row, 0), is_failed, row in unconstrained, logprobs.get(row))
            )
        return np.array([token_ids.get(row, -1) for row in sampled.tolist()], dtype=np.int64)
