"""What the result of a step means: computed tokens, sampled ones, log-probabilities, and the ends that follow."""

from __future__ import annotations

from collections.abc import Iterator

from control_plane.scheduler.logprobs import PromptLogprobs
from control_plane.scheduler.requests.sequence import Row, SequenceGroup, accept_next_tokens
from control_plane.scheduler.requests.states import SequenceState
from control_plane.scheduler.step.beams import advance, outputs_of
from control_plane.scheduler.step.plan_draft import InFlightStep, num_prompt_logprobs_due
from control_plane.scheduler.step.worker_state import WorkerState
from control_plane.scheduler.types import FinishReason, Outputs, RequestOutput, StepResult


class StepResults:
    """Applies the step results of one worker to its sequences."""

    def __init__(self, worker: WorkerState) -> None:
        self._worker = worker
        self._rows = worker.rows
        self._lifecycle = worker.lifecycle
        self.num_tokens_sampled = 0  # accepted, in all

    def apply(self, step: InFlightStep, result: StepResult, outputs: Outputs) -> None:
        """Apply the result of `step`, for which it was checked, and append what it brings the requests."""
        without_token = result.waiting_rows.union(result.failed_rows)
        tokens: Iterator[int | None] = iter(result.token_ids)
        if without_token:
            sampled = iter(result.token_ids)
            tokens = iter([None if row_idx in without_token else next(sampled) for row_idx in step.sampled_rows])
        self._apply_decodes(step.decodes, tokens, result, outputs)  # the tokens that remain are the prefills'
        others = outputs.others
        for row, num_tokens, samples in step.prefills:
            sequence = row.sequence
            self._rows.release_copied(row)
            token_id = next(tokens) if samples else None
            if sequence.awaits_prompt_logprobs and not sequence.is_ended:
                returned = result.prompt_logprobs.get(row.row_idx, [])
                if len(returned) < num_prompt_logprobs_due(row, num_tokens):
                    row.end_step()
                    self._fail(sequence.group, others)
                    continue
                sequence.group.add_prompt_logprobs(returned)
            if samples:
                self._apply_token(row, num_tokens, token_id, result, others)
            else:
                self._apply_chunk(row, num_tokens)

    def _apply_decodes(
        self, decodes: list[Row], tokens: Iterator[int | None], result: StepResult, outputs: Outputs
    ) -> None:
        """Apply the results of rows that decoded. Nearly all are one more token and nothing else."""
        num_before = len(outputs.tokens)

        def look_closely(row: Row, token_id: int | None) -> None:
            self._apply_token(row, 1, token_id, result, outputs.others)

        accept_next_tokens(decodes, tokens, outputs.tokens, look_closely)
        self.num_tokens_sampled += len(outputs.tokens) - num_before

    def _apply_token(
        self, row: Row, num_tokens: int, token_id: int | None, result: StepResult, outputs: list[RequestOutput]
    ) -> None:
        """Apply the result of a row that was to sample. `token_id` None: it failed, or sat out the step."""
        row.end_step()
        sequence = row.sequence
        if row.row_idx in result.waiting_rows:
            self._apply_wait(row, num_tokens)
        elif sequence.is_ended:
            self._lifecycle.finish_leaving(row)
        elif token_id is not None:
            row.note_computed(num_tokens)
            if sequence.is_host_fed:
                self._apply_beam(row, result, outputs)
            elif sequence.request.pooling is not None:
                self._apply_vector(row, result, outputs)
            else:
                self._accept(row, token_id, result, outputs)
        elif row.row_idx in result.unconstrained_rows:
            outputs.append(ending(sequence.group, FinishReason.CONSTRAINT_FAILED))
            self._lifecycle.end(sequence.group)
        else:
            self._fail(sequence.group, outputs)

    def _accept(self, row: Row, token_id: int, result: StepResult, outputs: list[RequestOutput]) -> None:
        """Accept a sampled token, which may end its completion."""
        sequence, group = row.sequence, row.sequence.group
        reason = sequence.accept(token_id)
        group.note_progress()
        self.num_tokens_sampled += 1
        output = group.output([token_id], reason)
        if sequence.has_extras:
            _add_extras(row, output, result)
        if not sequence.is_cancelled:
            outputs.append(output)
        if row.num_computed >= row.register_at:
            self._rows.register(row)
        if row.state is SequenceState.RUNNING:
            row.apply_on()
        if reason is None:
            self._lifecycle.finish_leaving(row)
        else:
            self._lifecycle.end_sequence(sequence)

    def _apply_wait(self, row: Row, num_tokens: int) -> None:
        """Apply the result of a row that computed and did not sample: a later step feeds its last token again."""
        row.plan_last_again()
        if not row.sequence.is_ended:
            row.note_computed(num_tokens - 1)
        self._rows.regroup()
        self._lifecycle.finish_leaving(row)

    def _apply_vector(self, row: Row, result: StepResult, outputs: list[RequestOutput]) -> None:
        """Apply the vector of a row with `pooling`, which ends its request."""
        self._rows.register(row)
        output = row.sequence.group.output([], FinishReason.POOLED)
        output.pooled = result.pooled[row.row_idx]
        outputs.append(output)
        self._lifecycle.end_sequence(row.sequence)

    def _fail(self, group: SequenceGroup, outputs: list[RequestOutput]) -> None:
        """End a request whose logits were not finite, at a token to sample or with a log-probability to return."""
        # What it computed may not be finite either: no other request may start from it.
        for member in group.members:
            if member.row is not None:
                self._worker.cache.forget(member.row.block_ids)
        end = ending(group, FinishReason.NOT_FINITE)
        end.request = group.request_so_far()
        outputs.append(end)
        self._lifecycle.end(group)

    def _apply_beam(self, row: Row, result: StepResult, outputs: list[RequestOutput]) -> None:
        """Apply the result of a beam; with the last of them the search goes on, or is over."""
        sequence, group = row.sequence, row.sequence.group
        searcher = group.searcher
        assert searcher is not None, "a host-fed row without a beam search"
        self._register_prompt(row)
        if row.state is SequenceState.LEAVING:  # preempted: all beams are computed again
            self._lifecycle.finish_leaving(row)
            return
        if not group.add_candidates(sequence, result.logprobs[row.row_idx].top):
            return
        advance(group, searcher, self._worker)
        group.note_progress()
        self.num_tokens_sampled += len(searcher.beams)
        if not searcher.beams:
            outputs += outputs_of(group, searcher)
            self._lifecycle.end(group)

    def _register_prompt(self, row: Row) -> None:
        """Offer computed blocks to the prefix cache, but none with tokens of beams.

        The last block of a beam that is dropped must be in no other request's table (beams.py).
        """
        if not row.sequence.generated:
            self._rows.register(row)

    def _apply_chunk(self, row: Row, num_tokens: int) -> None:
        """Apply the result of a prefill chunk that sampled nothing."""
        row.end_step()
        sequence = row.sequence
        if not sequence.is_ended:
            row.note_computed(num_tokens)
            if sequence.is_host_fed:
                self._register_prompt(row)
            else:
                self._rows.register(row)
        self._lifecycle.finish_leaving(row)


def _add_extras(row: Row, output: RequestOutput, result: StepResult) -> None:
    """Add what only some requests want."""
    sequence = row.sequence
    output.index = sequence.index
    if sequence.sampling.num_logprobs is not None:
        output.logprobs = [result.logprobs[row.row_idx]]
    if sequence.sampling.num_prompt_logprobs is not None and len(sequence.generated) == 1:
        output.prompt_logprobs = sequence.group.take_prompt_logprobs() or PromptLogprobs()


def ending(group: SequenceGroup, reason: FinishReason) -> RequestOutput:
    """The output that ends a request otherwise than by its tokens, once for all of its completions."""
    output = group.output([], reason)
    output.index = min(member.index for member in group.members if not member.is_ended and not member.is_cancelled)
    output.num_searched = group.num_searched
    return output
