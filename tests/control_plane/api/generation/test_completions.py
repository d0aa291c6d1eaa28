"""GenerationService with several and ranked completions, beams, log-probabilities and tenants."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
from motet.v1 import generation_pb2, generation_pb2_grpc, types_pb2

from control_plane.api.generation import kept_deltas, request as generation_request
from control_plane.api.generation.kept_deltas import KeptDeltas
from control_plane.api.text.codec import TextCodec
from control_plane.fleet.requests.streams import JobEvent
from control_plane.scheduler.types import BeamSearch, FinishReason, Sampling, TokenLogprobs, sample_seed
from tests.control_plane.api.fakes import Api, details, job_event
from tests.control_plane.api.generation.calls import generate, ids_of, request, script
from tests.control_plane.api.tokenizers import byte_level_tokenizer

LENGTH = FinishReason.LENGTH
Response = generation_pb2.GenerateResponse


def logprobs_of(token_id: int, logprob: float = -0.5, top: tuple[tuple[int, float], ...] = ()) -> TokenLogprobs:
    return TokenLogprobs(token_id, logprob, 1 + len(top), top)


def event(index: int, tokens: list[int], reason: FinishReason | None = None, **fields: Any) -> JobEvent:
    return job_event(tokens, reason, index=index, **fields)


def scored(index: int, tokens: list[int], logprobs: list[float], reason: FinishReason | None = None) -> JobEvent:
    return event(index, tokens, reason, logprobs=[logprobs_of(*pair) for pair in zip(tokens, logprobs, strict=True)])


def of_index(responses: list[Response], index: int) -> tuple[list[int], str, Any]:
    """Tokens, text and end of one completion; its offsets are contiguous and nothing follows its end."""
    deltas = [r.delta for r in responses if r.WhichOneof("event") == "delta" and r.delta.index == index]
    ends = [r for r in responses if r.WhichOneof("event") == "finished" and r.finished.index == index]
    tokens: list[int] = []
    for delta in deltas:
        assert delta.token_offset == len(tokens)
        tokens += delta.token_ids
        assert delta.completion_tokens == len(tokens)
    assert len(ends) == 1
    return tokens, "".join(delta.text for delta in deltas), ends[0].finished


async def test_samples_come_as_they_are_each_with_its_own_end(api: Api) -> None:
    script(
        api,
        event(0, ids_of("he")),
        event(1, ids_of("ll")),
        event(0, ids_of("o", "!"), LENGTH),
        event(1, ids_of("o"), FinishReason.STOP_TOKEN),
    )
    responses = await generate(
        api,
        request(decoding={"n": 2}, sampling={"temperature": 1, "seed": 9}, stopping={"stop_token_ids": ids_of("o")}),
    )
    kinds = [response.WhichOneof("event") for response in responses]
    assert kinds == ["started", "delta", "delta", "delta", "finished", "delta", "finished"]
    assert responses[0].started.decoding == types_pb2.DecodingParams(n=2, best_of=2)
    tokens, text, end = of_index(responses, 0)
    assert (tokens, text, end.reason) == (ids_of("he", "o", "!"), "heo!", types_pb2.FINISH_REASON_LENGTH)
    assert (end.usage.completion_tokens, end.seed) == (3, 9)
    tokens, text, end = of_index(responses, 1)
    assert (tokens, text, end.reason) == (ids_of("ll", "o"), "ll", types_pb2.FINISH_REASON_STOP_TOKEN)
    assert (end.usage.completion_tokens, end.seed) == (2, sample_seed(9, 1))
    work = api.fleet.requests[0]
    assert (work.num_samples, work.beam, work.sampling.num_logprobs) == (2, None, None)


async def test_stop_string_ends_its_own_completion_only(api: Api) -> None:
    script(
        api,
        event(0, ids_of("he", "ll")),
        event(1, ids_of("he")),
        event(1, ids_of("ll", "o")),
        event(1, ids_of("x")),  # under way when it was given up
        event(0, ids_of("!"), LENGTH),
    )
    responses = await generate(api, request(decoding={"n": 2}, stopping={"stop": ["llo"], "max_tokens": 9}))
    assert of_index(responses, 0)[:2] == (ids_of("he", "ll", "!"), "hell!")
    tokens, text, end = of_index(responses, 1)
    assert (tokens, text, end.stop_string) == (ids_of("he", "ll", "o"), "he", "llo")
    assert api.fleet.jobs[0].given_up == [1]


async def test_best_of_ranks_by_mean_log_probability_and_returns_nothing_before(api: Api) -> None:
    script(
        api,
        scored(0, ids_of("he"), [-1.0]),
        scored(1, ids_of("ll"), [-0.1]),
        scored(2, ids_of("o"), [-0.4], LENGTH),
        scored(0, ids_of("!"), [-3.0], LENGTH),
        scored(1, ids_of("x", "a"), [-0.4, -0.5], LENGTH),
    )
    responses = await generate(
        api,
        request(decoding={"n": 2, "best_of": 3}, sampling={"temperature": 1, "seed": 5}, stopping={"max_tokens": 3}),
    )
    assert [response.WhichOneof("event") for response in responses] == [
        "started",
        *["delta", "finished"] * 2,
    ]
    best, second = of_index(responses, 0), of_index(responses, 1)
    assert best[:2] == (ids_of("ll", "x", "a"), "llxa") and best[2].seed == sample_seed(5, 1)  # mean -1/3
    assert second[:2] == (ids_of("o"), "o") and second[2].seed == sample_seed(5, 2)
    # Log-probabilities were needed and not requested.
    assert api.fleet.requests[0].sampling.num_logprobs == 0
    assert not any(response.delta.logprobs for response in responses)
    assert not best[2].HasField("cumulative_logprob") and not responses[0].started.sampling.HasField("logprobs")


async def test_equal_samples_are_ranked_by_index_however_their_tokens_were_gathered(api: Api) -> None:
    """How many tokens come at once is a matter of time and of drafts, which must not decide between samples."""
    script(
        api,
        scored(0, [5], [-0.1]),
        scored(0, [6], [-0.2]),
        scored(0, [7], [-0.3], LENGTH),
        scored(1, [5], [-0.1]),
        scored(1, [6, 7], [-0.2, -0.3], LENGTH),
    )
    responses = await generate(api, request(decoding={"best_of": 2}, sampling={"temperature": 1, "seed": 5}))
    assert of_index(responses, 0)[2].seed == 5


async def test_best_of_returns_requested_log_probabilities(api: Api) -> None:
    script(api, scored(0, [5], [-2.0], LENGTH), scored(1, [6, 7], [-1.0, -0.5], LENGTH))
    responses = await generate(api, request(decoding={"best_of": 2}, sampling={"logprobs": 0}))
    tokens, _, end = of_index(responses, 0)
    assert tokens == [6, 7] and end.cumulative_logprob == -1.5
    assert [entry.logprob for r in responses for entry in r.delta.logprobs] == [-1.0, -0.5]


async def test_completions_chosen_at_the_end_come_in_parts_of_bounded_size(
    api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kept_deltas, "MAX_DELTA_TOKENS", 4)
    script(
        api,
        *[scored(0, ids_of("he"), [-1.0]) for _ in range(9)],
        scored(1, ids_of("o"), [-9.0], LENGTH),
        scored(0, ids_of("!"), [-1.0], LENGTH),
    )
    responses = await generate(api, request(decoding={"best_of": 2}))
    assert [len(r.delta.token_ids) for r in responses[1:-1]] == [4, 4, 2]
    assert of_index(responses, 0)[1] == "he" * 9 + "!"


async def test_beams_come_at_the_end_best_first(api: Api) -> None:
    script(
        api,
        event(0, ids_of("he", "ll"), LENGTH, score=-0.25),
        event(1, ids_of("o"), FinishReason.STOP_TOKEN, score=-0.5),
        event(2, [], LENGTH, score=-1e9),  # of a search that found two only
    )
    responses = await generate(
        api,
        request(
            decoding={"n": 3, "beam_search": {"width": 3, "length_penalty": -2, "early_stopping": True}},
            sampling={"temperature": 0},
            stopping={"min_tokens": 1},
        ),
    )
    assert [response.WhichOneof("event") for response in responses] == [
        "started",
        *["delta", "finished"] * 2,
        "finished",
    ]
    beam = responses[0].started.decoding.beam_search
    assert (beam.width, beam.length_penalty, beam.early_stopping) == (3, -2.0, True)
    tokens, text, end = of_index(responses, 0)
    assert (tokens, text, end.score, end.cumulative_logprob) == (ids_of("he", "ll"), "hell", -0.25, -0.0625)
    tokens, text, end = of_index(responses, 1)
    assert (tokens, text, end.score) == (ids_of("o"), "", -0.5)  # its last token ended it
    tokens, text, end = of_index(responses, 2)
    assert (tokens, text, end.score, end.HasField("cumulative_logprob")) == ([], "", -1e9, False)
    work = api.fleet.requests[0]
    assert work.beam == BeamSearch(3, -2.0, early_stopping=True) and work.num_samples == 1
    assert work.sampling == Sampling(seed=1234, min_tokens=1)
    again = await generate(api, request(decoding=responses[0].started.decoding, sampling=responses[0].started.sampling))
    assert again[0].started.decoding == responses[0].started.decoding


async def test_a_long_beam_that_comes_at_once_is_sent_in_parts(tmp_path: Path) -> None:
    codec = TextCodec(byte_level_tokenizer(), None)
    async with Api(tmp_path, codec, max_model_len=2000).running() as api:
        tokens = ids_of("he", "ll", "o") * 250
        script(api, event(0, tokens, LENGTH, score=-0.25), event(1, tokens[:1], LENGTH, score=-0.5))
        responses = await generate(api, request(decoding={"beam_search": {"width": 2}}, stopping={"max_tokens": 750}))
    deltas = [response.delta for response in responses if response.WhichOneof("event") == "delta"]
    assert [len(delta.token_ids) for delta in deltas] == [256, 256, 238]
    received, text, end = of_index(responses, 0)
    assert (received, text) == (tokens, "hello" * 250)
    assert (end.reason, end.score, end.usage.completion_tokens) == (types_pb2.FINISH_REASON_LENGTH, -0.25, 750)
    await codec.close()


async def test_kept_log_probabilities_come_in_parts_of_bounded_size(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept_deltas, "MAX_DELTA_LOGPROBS", 6)
    top = ((9, -0.25), (5, -1.5))
    script(
        api,
        *[event(0, [5], logprobs=[logprobs_of(5, -1.5, top)]) for _ in range(4)],
        event(0, [6], LENGTH, logprobs=[logprobs_of(6, -1.0, top)]),
        event(1, [7], LENGTH, logprobs=[logprobs_of(7, -9.0, top)]),
    )
    responses = await generate(api, request(decoding={"best_of": 2}, sampling={"logprobs": 2}))
    deltas = [response.delta for response in responses if response.WhichOneof("event") == "delta"]
    assert [len(delta.logprobs) for delta in deltas] == [2, 2, 1]
    assert [(entry.token_id, len(entry.top)) for delta in deltas for entry in delta.logprobs] == [(5, 2)] * 4 + [(6, 2)]


async def test_log_probabilities_of_prompt_and_tokens(api: Api) -> None:
    top = ((9, -0.25), (5, -1.5))
    script(
        api,
        job_event(
            [5], logprobs=[logprobs_of(5, -1.5, top)], prompt_logprobs=[logprobs_of(6, -2.0), logprobs_of(7, -3.0)]
        ),
        job_event([8, 4], logprobs=[logprobs_of(8, -1.0), logprobs_of(4, -0.5)]),
        job_event([3], LENGTH, logprobs=[logprobs_of(3, -1.0)]),
    )
    responses = await generate(api, request(sampling={"logprobs": 2, "prompt_logprobs": 0}))
    started, deltas = responses[0].started, [r.delta for r in responses[1:-1]]
    assert [(entry.token_id, entry.logprob) for entry in started.prompt_logprobs] == [(6, -2.0), (7, -3.0)]
    assert (started.sampling.logprobs, started.sampling.prompt_logprobs) == (2, 0)
    assert [len(delta.logprobs) for delta in deltas] == [1, 2, 1]
    first = deltas[0].logprobs[0]
    assert (first.token_id, first.rank, [(t.token_id, t.logprob) for t in first.top]) == (5, 3, list(top))
    assert responses[-1].finished.cumulative_logprob == -4.0
    work = api.fleet.requests[0].sampling
    assert (work.num_logprobs, work.num_prompt_logprobs) == (2, 0)


async def test_tokens_behind_a_stop_string_have_no_log_probabilities(api: Api) -> None:
    tokens = ids_of("he", "o", "x")
    script(api, job_event(tokens, logprobs=[logprobs_of(token, -1.0) for token in tokens]))
    responses = await generate(api, request(sampling={"logprobs": 0}, stopping={"stop": ["o"]}))
    assert [entry.token_id for entry in responses[1].delta.logprobs] == tokens[:2]
    assert responses[-1].finished.cumulative_logprob == -2.0


async def test_sum_of_a_resumed_stream_is_not_made_up(api: Api) -> None:
    script(api, job_event([5], LENGTH, logprobs=[logprobs_of(5)]))
    responses = await generate(
        api, request(sampling={"logprobs": 0}, resume_from={"ids": [4]}, stopping={"max_tokens": 2})
    )
    assert not responses[-1].finished.HasField("cumulative_logprob")


async def test_stop_strings_are_not_looked_for_before_min_tokens(api: Api) -> None:
    script(api, job_event(ids_of("he", "ll")), job_event(ids_of("o", "he", "!"), LENGTH))
    responses = await generate(api, request(stopping={"stop": ["he"], "min_tokens": 2, "max_tokens": 9}))
    tokens, text, end = of_index(responses, 0)
    assert (tokens, text, end.stop_string) == (ids_of("he", "ll", "o", "he"), "hello", "he")
    assert responses[0].started.stopping.min_tokens == 2
    assert api.fleet.requests[0].sampling.min_tokens == 2


async def test_every_sampling_value_reaches_the_request_and_started(api: Api) -> None:
    script(api, job_event([5], LENGTH))
    values: dict[str, Any] = {
        "temperature": 0.5,
        "top_k": 7,
        "top_p": 0.5,
        "seed": 3,
        "min_p": 0.25,
        "repetition_penalty": 1.25,
        "presence_penalty": -0.5,
        "frequency_penalty": 2.0,
        "logit_bias": {9: -100.0, 4: 1.5},
        "logprobs_mode": types_pb2.LOGPROBS_MODE_PROCESSED,
    }
    responses = await generate(api, request(sampling=values, priority=-7))
    work = api.fleet.requests[0]
    expected = {**values, "logit_bias": ((4, 1.5), (9, -100.0))}
    assert work.sampling == Sampling(**expected) and work.priority == -7
    assert responses[0].started.sampling == types_pb2.SamplingParams(**values)


async def test_prompt_log_probabilities_beyond_a_message_are_refused(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(generation_request, "MAX_PROMPT_LOGPROB_ENTRIES", 5)
    script(api, job_event([5], LENGTH))
    assert await generate(api, request(sampling={"prompt_logprobs": 1}))  # two tokens, two entries each
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await generate(api, request(sampling={"prompt_logprobs": 2}))
    assert details(caught.value)[1] == ["sampling.prompt_logprobs"]
    assert "6 log-probabilities; at most 5" in (caught.value.details() or "")


def call(api: Api, *metadata: tuple[str, str]) -> Any:
    return api.stub(generation_pb2_grpc.GenerationServiceStub).Generate(request(), metadata=metadata)


async def test_tenant_of_the_metadata_is_counted_and_returned(api: Api) -> None:
    script(api, job_event([5], LENGTH))
    responses = [response async for response in call(api, ("motet-tenant", "team-a.x_1"))]
    assert responses[0].started.tenant == api.fleet.requests[0].tenant == "team-a.x_1"


@pytest.mark.parametrize("tenants", [[""], ["A"], ["a b"], ["x" * 64], ["a", "b"]])
async def test_bad_tenant_is_refused(api: Api, tenants: list[str]) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        [response async for response in call(api, *[("motet-tenant", tenant) for tenant in tenants])]
    assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT
    assert details(caught.value)[1] == ["motet-tenant"]
    assert not api.fleet.requests


async def test_completions_to_be_ranked_keep_no_log_probabilities_that_were_not_requested(
    api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A request may be held back for millions of tokens; their sum ranks them."""
    kept = []
    add = KeptDeltas.add

    def spied(completion: KeptDeltas, token_ids: Any, text: str, logprobs: Any) -> None:
        kept.append(logprobs)
        add(completion, token_ids, text, logprobs)

    monkeypatch.setattr(KeptDeltas, "add", spied)
    script(api, scored(0, [5], [-2.0], LENGTH), scored(1, [6, 7], [-1.0, -0.5], LENGTH))
    await generate(api, request(decoding={"best_of": 2}))
    assert kept == [None, None]


async def test_bytes_of_tokens_come_with_their_log_probabilities(api: Api) -> None:
    """A part of a character is its bytes; a special token is as it is written."""
    emoji, end, other = ids_of("ðŁ", "</s>", "he")
    script(
        api,
        job_event([emoji], logprobs=[logprobs_of(emoji, -1.5, ((end, -2.0),))], prompt_logprobs=[logprobs_of(other)]),
        job_event([other], LENGTH, logprobs=[logprobs_of(other, -1.0)]),
    )
    params = {"logprobs": 1, "prompt_logprobs": 0}
    responses = await generate(api, request(sampling=params, output={"token_bytes": True}))
    assert [entry.token for entry in responses[0].started.prompt_logprobs] == [b"he"]
    entries = [entry for response in responses for entry in response.delta.logprobs]
    assert [entry.token for entry in entries] == ["😀".encode()[:2], b"he"]
    assert [top.token for top in entries[0].top] == [b"</s>"]
    plain = await generate(api, request(sampling=params))
    assert not any(entry.token for response in plain for entry in response.delta.logprobs)


async def test_bytes_of_tokens_come_with_ranked_completions(api: Api) -> None:
    (token,) = ids_of("he")
    script(api, scored(0, [token], [-1.0], LENGTH), scored(1, [token], [-2.0], LENGTH))
    fields: Any = {"decoding": {"best_of": 2}, "sampling": {"logprobs": 0}, "output": {"token_bytes": True}}
    responses = await generate(api, request(**fields))
    assert [entry.token for response in responses for entry in response.delta.logprobs] == [b"he"]
