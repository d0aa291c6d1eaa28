"""The bytes of an response are what the SDK's own generated code reads."""

from __future__ import annotations

import math

from motet import Completion, Finished, FinishReason, Generation, Timings, TokenLogprob, TokenLogprobs, Usage
from motet.v1 import generation_pb2
from motet.wire import started_from
from tinker.proto.response_conv import deserialize_sample_response

from gateway.tinker.protobuf import sample_response

TIMINGS = Timings(0.0, 0.0, 0.0)


def logprobs(token_id: int, *top: tuple[int, float]) -> TokenLogprobs:
    return TokenLogprobs(token_id, -0.25 * token_id, 1, tuple(TokenLogprob(*one) for one in top))


def completion(index: int, reason: FinishReason, *scored: TokenLogprobs) -> Completion:
    finished = Finished(reason, "", Usage(3, 2, len(scored)), TIMINGS, seed=1, index=index)
    return Completion(index, "", tuple(one.token_id for one in scored), finished, scored)


def generation(*completions: Completion) -> Generation:
    started = started_from(generation_pb2.GenerationStarted(cached_tokens=300))
    return Generation("", completions[0].token_ids, started, completions[0].finished, completions)


def test_sequences_logprobs_and_top_tokens_arrive() -> None:
    ended = completion(0, FinishReason.STOP_TOKEN, logprobs(300, (300, -0.5), (70000, -1.0)), logprobs(2, (2, -3.0)))
    long = completion(1, FinishReason.LENGTH, logprobs(7, (7, 0.0), (8, -9.0)))
    prompt = [logprobs(5, (5, -1.0)), logprobs(6, (6, -2.0)), logprobs(7, (7, -4.0))]
    response = deserialize_sample_response(
        sample_response(
            generation(ended, long), num_top=2, prompt=prompt, num_prompt_top=1, last_n=2, with_prompt_logprobs=True
        )
    )
    first, second = response.sequences
    assert (first.stop_reason, second.stop_reason) == ("stop", "length")
    assert (first.tokens, second.tokens) == ([300, 2], [7])
    assert (first.logprobs, second.logprobs) == ([-75.0, -0.5], [-1.75])
    assert first.topk_logprobs == [[(300, -0.5), (70000, -1.0)], [(2, -3.0)]]
    assert response.prompt_logprobs == [None, None, -1.5, -1.75]
    assert response.topk_prompt_logprobs == [None, None, [(6, -2.0)], [(7, -4.0)]]
    assert response.prompt_cache_hit_tokens == 300


def test_what_was_not_requested_is_not_there() -> None:
    ended = completion(0, FinishReason.STOP_STRING, logprobs(1))
    response = deserialize_sample_response(
        sample_response(
            generation(ended), num_top=0, prompt=None, num_prompt_top=0, last_n=None, with_prompt_logprobs=False
        )
    )
    assert response.prompt_logprobs is None and response.topk_prompt_logprobs is None
    assert response.sequences[0].topk_logprobs is None and response.sequences[0].logprobs == [-0.25]


def test_the_first_token_of_a_prompt_has_no_logprob() -> None:
    ended = completion(0, FinishReason.LENGTH, logprobs(1))
    response = deserialize_sample_response(
        sample_response(
            generation(ended), num_top=0, prompt=(), num_prompt_top=0, last_n=None, with_prompt_logprobs=True
        )
    )
    assert response.prompt_logprobs_np is not None and math.isnan(response.prompt_logprobs_np[0])
    assert response.prompt_logprobs == [None]
