"""What requests are due from a correct scheduler, and what they got: every output is checked as it comes."""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import replace

from control_plane.scheduler.requests.beam_search import BeamSearcher, Hypothesis
from control_plane.scheduler.step.beams import NO_SCORE
from control_plane.scheduler.types import Completion, FinishReason, Request, RequestId, RequestOutput, TokenLogprobs
from tests.fakes.model_worker import VOCAB_SIZE, chain_of, logprobs_of, oracle, vector_of


def beam_oracle(request: Request, max_model_len: int) -> list[Hypothesis]:
    """What a beam search finds when nothing disturbs it, padded to its width; nothing without a beam search."""
    if request.beam is None:
        return []
    searcher = BeamSearcher(
        request.beam,
        stop_token_ids=request.stop_token_ids,
        min_tokens=request.sampling.min_tokens,
        max_generated=min(request.max_tokens, max_model_len - len(request.prompt_token_ids)),
    )
    while searcher.beams:
        values = [chain_of(request, [*request.prompt_token_ids, *beam.token_ids]) for beam in searcher.beams]
        searcher.advance([logprobs_of(value, 0, VOCAB_SIZE).top for value in values])
    return searcher.hypotheses + [Hypothesis((), NO_SCORE)] * (request.beam.width - len(searcher.hypotheses))


class Account:
    """One live request: what it is due by index, and what it got of it."""

    def __init__(self, request: Request, max_model_len: int) -> None:
        self.request = request
        self.hypotheses = beam_oracle(request, max_model_len)
        self.due = [list(hypothesis.token_ids) for hypothesis in self.hypotheses] or [
            [] if request.pooling is not None else oracle(request, max_model_len, index)
            for index in range(request.num_samples)
        ]
        self.got: list[list[int]] = [[] for _ in self.due]
        self.live = set(range(len(self.due)))

    def resumed(self, rng: random.Random) -> Request:
        """The request as it comes from a worker that was lost, with some of its tokens; its account begins there."""
        if self.hypotheses or self.request.pooling is not None:
            return self.request
        for index, due in enumerate(self.due):
            self.got[index] = due[: rng.randrange(len(due))]
        if len(self.due) == 1:
            return replace(self.request, generated_token_ids=tuple(self.got[0]))
        for index in range(1, len(self.due)):
            if rng.random() < 0.3:
                self.got[index] = self.due[index]
                self.live.discard(index)
        completions = tuple(Completion(tuple(got), index not in self.live) for index, got in enumerate(self.got))
        return replace(self.request, completions=completions)

    def check_carried(self, request: Request) -> None:
        """A request that is taken from its worker must carry what was returned of it, no more and no less."""
        if self.hypotheses:
            assert request == self.request, "a beam search begins again"
        elif len(self.due) == 1:
            assert list(request.generated_token_ids) == self.got[0], "a token is lost or added on the way"
        else:
            # The first completion computes the prompt for all, and may sample though it was cancelled.
            carried = [
                None if completion.is_ended else list(completion.token_ids) for completion in request.completions
            ]
            returned = [got if index in self.live else None for index, got in enumerate(self.got)]
            assert carried == returned, f"returned {returned}, but carried on: {carried}"

    def take(self, output: RequestOutput) -> None:
        """Record an output. It must be the next tokens of an index that has not ended."""
        index, request_id = output.index, output.request_id
        if output.finish_reason is FinishReason.POOLED:
            pooling, prompt = self.request.pooling, self.request.prompt_token_ids
            assert pooling is not None and output.pooled is not None and not output.token_ids
            due_vector = vector_of(chain_of(self.request, prompt), pooling)
            assert output.pooled.tolist() == due_vector.tolist(), f"request {request_id} got another vector"
            self.live.clear()
            return
        assert output.pooled is None, f"request {request_id} got a vector and has not ended"
        if output.finish_reason not in (None, FinishReason.LENGTH, FinishReason.STOP_TOKEN):
            assert not output.token_ids
            self.live.clear()  # returned with any of them, it ends them all
            return
        assert index in self.live, f"request {request_id} has output for completion {index} after its end"
        got, due = self.got[index], self.due[index]
        if self.hypotheses:
            assert output.score == self.hypotheses[index].score, f"request {request_id} got a wrong score"
            assert output.finish_reason is not None, f"request {request_id} has output of a beam before its end"
        self._check_logprobs(output, is_first=not got)
        got += output.token_ids
        assert got == due[: len(got)], f"request {request_id} got wrong tokens in completion {index}"
        if output.finish_reason is not None:
            assert got == due, f"request {request_id} ended completion {index} too early"
            self.live.discard(index)

    def _check_logprobs(self, output: RequestOutput, *, is_first: bool) -> None:
        sampling, prompt = self.request.sampling, self.request.prompt_token_ids
        chain = chain_of(self.request, [*prompt, *self.got[output.index]])
        expected: list[TokenLogprobs] | None = None
        if sampling.num_logprobs is not None and output.token_ids:
            expected = [logprobs_of(chain, output.token_ids[0], sampling.num_logprobs)]
        assert output.logprobs == expected, f"request {output.request_id} got wrong log-probabilities"
        expected = None
        if sampling.num_prompt_logprobs is not None and is_first and output.index == 0 and output.token_ids:
            values = (chain_of(self.request, prompt[:position]) for position in range(1, len(prompt)))
            expected = [
                logprobs_of(value, token_id, sampling.num_prompt_logprobs)
                for value, token_id in zip(values, prompt[1:], strict=True)
            ]
        assert output.prompt_logprobs == expected, f"request {output.request_id} got wrong ones of its prompt"


class Ledger:
    """The accounts of all live requests."""

    def __init__(self, max_model_len: int) -> None:
        self._max_model_len = max_model_len
        self.accounts: dict[RequestId, Account] = {}
        self.num_finished = 0  # requests that got all they were due
        self.ended_by: dict[FinishReason, int] = {}

    def open(self, request: Request) -> Account:
        """Expect everything that the request is due."""
        account = self.accounts[request.request_id] = Account(request, self._max_model_len)
        return account

    def take(self, outputs: Iterable[RequestOutput]) -> list[RequestId]:
        """Record outputs; the requests that ended with them."""
        ended: list[RequestId] = []
        for output in outputs:
            request_id = output.request_id
            assert request_id in self.accounts, f"request {request_id} has output after its end"
            account = self.accounts[request_id]
            account.take(output)
            if output.finish_reason is not None:
                self.ended_by[output.finish_reason] = self.ended_by.get(output.finish_reason, 0) + 1
            if not account.live:
                self.num_finished += output.finish_reason in (
                    FinishReason.LENGTH,
                    FinishReason.STOP_TOKEN,
                    FinishReason.POOLED,
                )
                self.close(request_id)
                ended.append(request_id)
        return ended

    def close(self, request_id: RequestId) -> None:
        """The request is over."""
        del self.accounts[request_id]
