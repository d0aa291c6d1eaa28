"""Books the answers to steps: computed tokens, sampled ones, log-probabilities, and the ends that follow from them."""

from __future__ import annotations

from collections.abc import Iterator

from control_plane.scheduler.logprobs import PromptLogprobs
from control_plane.scheduler.requests.sequence import Sequence, SequenceState
from control_plane.scheduler.requests.sequence_group import SequenceGroup
from control_plane.scheduler.step.beams import advance, outputs_of
from control_plane.scheduler.step.plan_draft import Flight, num_prompt_logprobs_due
from control_plane.scheduler.step.roster import Roster
from control_plane.scheduler.types import FinishReason, Outputs, RequestOutput, StepResult


class AnswerBook:
    """What the results of one worker mean for its sequences."""

    def __init__(self, roster: Roster) -> None:
        self._roster = roster
        self.num_tokens_sampled = 0  # accepted, in all

    def book(self, flight: Flight, result: StepResult, outputs: Outputs) -> None:
        """Take the answer to `flight`, which was checked to be that, and append what it brings the requests."""
        failed_rows = set(result.failed_rows)
        tokens: Iterator[int | None] = iter(result.token_ids)
        if failed_rows:
            told = iter(result.token_ids)
            tokens = iter([None if row in failed_rows else next(told) for row in flight.sampled_rows])
        self._book_decodes(flight.decodes, tokens, result, outputs)  # what is left over is the prefills'
        others = outputs.others
        for sequence, num_tokens, samples in flight.prefills:
            self._roster.release_copied(sequence)
            token_id = next(tokens) if samples else None
            if sequence.tells_prompt and not sequence.is_ended:
                prompt_told = result.prompt_logprobs.get(sequence.row, [])
                if len(prompt_told) < num_prompt_logprobs_due(sequence, num_tokens):
                    sequence.num_in_flight -= 1
                    self._fail(sequence.group, others)
                    continue
                if sequence.group.prompt_logprobs is None:
                    sequence.group.prompt_logprobs = PromptLogprobs()
                sequence.group.prompt_logprobs.extend(prompt_told)
            if samples:
                self._book_token(sequence, num_tokens, token_id, result, others)
            else:
                self._book_chunk(sequence, num_tokens)

    def _book_decodes(
        self,
        decodes: list[Sequence],
        tokens: Iterator[int | None],
        result: StepResult,
        outputs: Outputs,
    ) -> None:
        """Book the answers for the rows that decoded. Nearly all are one more token and nothing else."""
        pairs, others = outputs.tokens, outputs.others
        num_before = len(pairs)
        for sequence, token_id in zip(decodes, tokens, strict=False):
            num_computed = sequence.num_computed + 1
            if num_computed >= sequence.book_closely_at or token_id is None or token_id in sequence.stop_token_ids:
                self._book_token(sequence, 1, token_id, result, others)
                continue
            sequence.num_in_flight -= 1
            sequence.num_computed = num_computed
            sequence.generated.append(token_id)
            pairs.append((sequence.request_id, token_id))
        self.num_tokens_sampled += len(pairs) - num_before

    def _book_token(
        self,
        sequence: Sequence,
        num_tokens: int,
        token_id: int | None,
        result: StepResult,
        outputs: list[RequestOutput],
    ) -> None:
        """Book the answer for a row that sampled; None: its logits were not finite."""
        sequence.num_in_flight -= 1
        if not sequence.is_ended:
            group = sequence.group
            if token_id is None:
                self._fail(group, outputs)
                return
            sequence.num_computed += num_tokens
            if sequence.tells_more and sequence.is_stepwise:
                self._book_beam(sequence, result, outputs)
                return
            reason = sequence.accept(token_id)
            group.has_progressed = True
            self.num_tokens_sampled += 1
            output = RequestOutput(
                group.request.request_id, [token_id], reason, group.num_cached_tokens, group.first_scheduled_s
            )
            if sequence.tells_more:
                self._tell_more(sequence, output, result)
            outputs.append(output)
            if sequence.num_computed >= sequence.register_at:
                self._roster.register(sequence)
            if sequence.state is SequenceState.RUNNING:
                sequence.book_on()
            if reason is not None:
                if sequence.is_given_up:
                    outputs.pop()
                self._roster.end_member(sequence)
                return
        if sequence.num_in_flight == 0 and sequence.state is SequenceState.DRAINING:
            self._roster.leave(sequence)

    def _fail(self, group: SequenceGroup, outputs: list[RequestOutput]) -> None:
        """End a request whose logits were not finite, at a token that was to be sampled or told of."""
        # What it computed may not be finite either: nobody else may start from it.
        for member in group.members:
            self._roster.cache.forget(member.block_ids)
        end = ending(group, FinishReason.NOT_FINITE)
        end.request = group.request_so_far()
        outputs.append(end)
        self._roster.end(group)

    def _book_beam(self, sequence: Sequence, result: StepResult, outputs: list[RequestOutput]) -> None:
        """Book the answer for a beam; with the last of them the search goes on, or is over."""
        group, roster = sequence.group, self._roster
        searcher = group.searcher
        assert searcher is not None, "a stepwise row that is no beam"
        self._register_prompt(sequence)
        if sequence.state is SequenceState.DRAINING:  # preempted: all beams are asked again
            if sequence.num_in_flight == 0:
                roster.leave(sequence)
            return
        group.beam_candidates[sequence.index] = result.logprobs[sequence.row].top
        if len(group.beam_candidates) < len(group.beam_sequences):
            return
        advance(group, searcher, roster)
        group.has_progressed = True
        self.num_tokens_sampled += len(searcher.beams)
        if not searcher.beams:
            outputs += outputs_of(group, searcher)
            roster.end(group)

    def _register_prompt(self, sequence: Sequence) -> None:
        """Offer computed blocks to the prefix cache, but none with tokens of beams.

        The last block of a beam that is dropped is its own (beams.py), and no other request's.
        """
        if not sequence.generated:
            self._roster.register(sequence)

    def _tell_more(self, sequence: Sequence, output: RequestOutput, result: StepResult) -> None:
        """Add what only some requests ask for."""
        output.index = sequence.index
        if sequence.sampling.num_logprobs is not None:
            output.logprobs = [result.logprobs[sequence.row]]
        if sequence.sampling.num_prompt_logprobs is not None and len(sequence.generated) == 1:
            output.prompt_logprobs = sequence.group.prompt_logprobs or PromptLogprobs()
            sequence.group.prompt_logprobs = None

    def _book_chunk(self, sequence: Sequence, num_tokens: int) -> None:
        """Book the answer for a prefill chunk that sampled nothing."""
        sequence.num_in_flight -= 1
        if not sequence.is_ended:
            sequence.num_computed += num_tokens
            if sequence.is_stepwise:
                self._register_prompt(sequence)
            else:
                self._roster.register(sequence)
        if sequence.state is SequenceState.DRAINING and sequence.num_in_flight == 0:
            self._roster.leave(sequence)


def ending(group: SequenceGroup, reason: FinishReason) -> RequestOutput:
    """The last word on a request that ended otherwise than by its tokens, told once for all of its answers."""
    output = RequestOutput(group.request.request_id, [], reason, group.num_cached_tokens, group.first_scheduled_s)
    output.index = min(member.index for member in group.members if not member.is_ended and not member.is_given_up)
    output.num_searched = group.num_searched
    return output
