"""Several completions, beam search, log-probabilities, priorities and tenants, with both clients."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import grpc
import pytest
from google.protobuf.duration_pb2 import Duration
from google.rpc import error_details_pb2
from motet import (
    BeamSearch,
    DataLoss,
    FinishReason,
    InvalidArgument,
    ResourceExhausted,
    TokenLogprob,
    TokenLogprobs,
)
from motet.v1 import types_pb2

from tests.client.conftest import Driver
from tests.client.scripted_server import (
    WORKER_LOST,
    Response,
    Script,
    ScriptedServer,
    abort,
    delta,
    finished,
    playing,
    started,
    text_of,
)
from tests.client.test_generation import TOKENS, refusing, sending


def logprob_of(token_id: int, logprob: float) -> types_pb2.TokenLogprobs:
    return types_pb2.TokenLogprobs(
        token_id=token_id, logprob=logprob, rank=2, top=[types_pb2.TokenLogprob(token_id=3, logprob=-0.25)]
    )


def test_completions_are_folded_by_index(server: ScriptedServer, driver: Driver) -> None:
    server.scripts.append(
        sending(
            started(n=2, best_of=3, tenant="team"),
            delta(0, [5], "a"),
            delta(0, [7, 8], "xy", index=1),
            delta(1, [6], "b"),
            finished(2, reason=types_pb2.FINISH_REASON_STOP_STRING, index=1, stop_string="z"),
            delta(2, [], "c"),
            finished(2, cumulative_logprob=-1.5),
        )
    )
    chunks, result = driver.generate("hi", n=2, best_of=3)
    assert [(chunk.index, chunk.token_offset, chunk.text) for chunk in chunks] == [
        (0, 0, "a"),
        (1, 0, "xy"),
        (0, 1, "b"),
        (1, 2, ""),
        (0, 2, "c"),
        (0, 2, ""),
    ]
    first, second = result.completions
    assert (result.text, result.token_ids, result.finished) == (first.text, first.token_ids, first.finished)
    assert (first.text, first.token_ids, first.finished.cumulative_logprob) == ("abc", (5, 6), -1.5)
    assert (second.index, second.text, second.token_ids) == (1, "xy", (7, 8))
    assert (second.finished.finish_reason, second.finished.stop_string) == (FinishReason.STOP_STRING, "z")
    assert (result.started.n, result.started.best_of, result.started.tenant) == (2, 3, "team")
    request = server.requests[0]
    assert request.decoding == types_pb2.DecodingParams(n=2, best_of=3)


def test_every_option_reaches_the_wire(server: ScriptedServer, driver: Driver) -> None:
    server.scripts.append(sending(started(n=2), finished(0), finished(0, index=1, score=-0.5)))
    _, result = driver.generate(
        "hi",
        n=2,
        beam_search=BeamSearch(4, length_penalty=0.5, early_stopping=False),
        min_p=0.25,
        repetition_penalty=1.5,
        presence_penalty=-0.5,
        frequency_penalty=0.5,
        logit_bias={7: -2.0},
        logprobs=0,
        prompt_logprobs=3,
        min_tokens=2,
        priority=-3,
        tenant="team",
    )
    request = server.requests[0]
    beams = types_pb2.BeamSearchParams(width=4, length_penalty=0.5, early_stopping=False)
    assert request.decoding == types_pb2.DecodingParams(n=2, beam_search=beams)
    assert request.sampling == types_pb2.SamplingParams(
        min_p=0.25,
        repetition_penalty=1.5,
        presence_penalty=-0.5,
        frequency_penalty=0.5,
        logit_bias={7: -2.0},
        logprobs=0,
        prompt_logprobs=3,
    )
    assert (request.stopping.min_tokens, request.priority, server.tenants) == (2, -3, ["team"])
    assert result.completions[1].finished.score == -0.5


def test_log_probabilities_are_returned_and_summed_over_a_break(server: ScriptedServer, driver: Driver) -> None:
    def breaking(request: Any, context: grpc.ServicerContext) -> Iterator[Response]:
        yield started(prompt_logprobs=[logprob_of(9, -3.0)])
        yield delta(0, [5], "a", logprobs=[logprob_of(5, -0.5)])
        abort(context, grpc.StatusCode.UNAVAILABLE, "the worker was lost", WORKER_LOST)

    rest = sending(started(), delta(1, [6], "b", logprobs=[logprob_of(6, -1.0)]), finished(2))
    server.scripts.extend([breaking, rest])
    chunks, result = driver.generate("hi", logprobs=1, prompt_logprobs=1)
    first = TokenLogprobs(5, -0.5, 2, (TokenLogprob(3, -0.25),))
    assert chunks[0].logprobs == (first,) and result.completions[0].logprobs[0] == first
    assert [entry.token_id for entry in result.completions[0].logprobs] == [5, 6]
    assert result.finished.cumulative_logprob == -1.5
    assert [entry.token_id for entry in result.started.prompt_logprobs] == [9]
    resumed = server.requests[1].sampling
    assert resumed.HasField("logprobs") and not resumed.HasField("prompt_logprobs")  # the first call returned them


SEVERAL = {0: [5, 6, 7, 8], 1: [9, 10], 2: [11, 12, 13]}


def playing_several(*, break_after: int | None = None, order: list[int] | None = None, per_delta: int = 1) -> Script:
    """A faithful server for SEVERAL, from the first token on. After `break_after` events in all the connection breaks.

    `order`: indices, one an event; the text of a token comes with the token behind it.
    """

    def script(request: Any, context: grpc.ServicerContext) -> Iterator[Response]:
        assert not request.resume_from.ids
        events = [started(n=3, seed=11), *_events_of_several(order or [0, 1, 2] * 9, per_delta)]
        yield from events[:break_after]
        if break_after is not None:
            abort(context, grpc.StatusCode.UNAVAILABLE, "Socket closed")

    return script


def _events_of_several(order: list[int], per_delta: int) -> Iterator[Response]:
    positions = dict.fromkeys(SEVERAL, 0)
    ended: set[int] = set()
    for index in order:
        tokens, start = SEVERAL[index], positions[index]
        if start < len(tokens):
            end = positions[index] = min(start + per_delta, len(tokens))
            spoken = [text_of(token) for token in tokens[max(start - 1, 0) : end - 1]]
            yield delta(start, tokens[start:end], "".join(spoken), index=index)
        elif index not in ended:
            ended.add(index)
            yield delta(start, [], text_of(tokens[-1]), index=index)
            yield finished(len(tokens), index=index)
    assert len(ended) == len(SEVERAL)


@pytest.mark.parametrize("break_after", range(1, 16))
@pytest.mark.parametrize("per_delta", [1, 3])
def test_broken_stream_of_several_completions_is_repeated_without_loss_or_repetition(
    server: ScriptedServer, driver: Driver, break_after: int, per_delta: int
) -> None:
    """The completions come in another order and in other pieces the second time."""
    again = playing_several(order=[2, 2, 1, 0] * 9, per_delta=per_delta)
    server.scripts.extend([playing_several(break_after=break_after), again])
    chunks, result = driver.generate("hi", n=3)
    for index, tokens in SEVERAL.items():
        mine = [chunk for chunk in chunks if chunk.index == index]
        assert [token for chunk in mine for token in chunk.token_ids] == tokens
        assert "".join(chunk.text for chunk in mine) == "".join(text_of(token) for token in tokens)
        assert [chunk.token_offset for chunk in mine if chunk.token_ids] == sorted(
            {chunk.token_offset for chunk in mine if chunk.token_ids}
        )
        assert [chunk.finish_reason for chunk in mine if chunk.finish_reason] == [FinishReason.LENGTH]
        assert mine[-1].finish_reason is not None and result.completions[index].token_ids == tuple(tokens)
    first, second = server.requests
    assert (second.sampling.seed, second.decoding, second.text) == (11, first.decoding, "hi")
    assert len(driver.sleeps) == 1


def test_completions_that_are_returned_at_the_end_are_requested_again(server: ScriptedServer, driver: Driver) -> None:
    def breaking(request: Any, context: grpc.ServicerContext) -> Iterator[Response]:
        yield started(n=2, best_of=4)
        yield delta(0, [5], "a")
        abort(context, grpc.StatusCode.UNAVAILABLE, "Socket closed")

    whole = sending(
        started(n=2, best_of=4),
        delta(0, [5, 6], "ab"),
        finished(2),
        delta(0, [7], "c", index=1),
        finished(1, index=1),
    )
    server.scripts.extend([breaking, refusing(grpc.StatusCode.UNAVAILABLE, "Socket closed"), whole])
    _, result = driver.generate("hi", n=2, best_of=4)
    assert [(completion.text, completion.token_ids) for completion in result.completions] == [
        ("ab", (5, 6)),
        ("c", (7,)),
    ]


@pytest.mark.parametrize(
    ("rest", "complaint"),
    [
        ([delta(0, [5, 9], "ab")], "other tokens than before from 0 on in completion 0"),
        ([delta(0, [5, 6], "ax")], "text differs"),
        (
            [delta(0, [5], "a"), finished(1)],
            "the end after 1 tokens, before all that was returned once, in completion 0",
        ),
        (
            [delta(0, [5, 6], "a"), finished(2)],
            "the end after 2 tokens, before all that was returned once, in completion 0",
        ),
        ([delta(0, [7, 8], "xy", index=1)], "more than before its end in completion 1"),
        (
            [delta(0, [7], "x", index=1), finished(1, index=1), finished(1, index=1)],
            "finished after the end of completion",
        ),
        ([delta(1, [6], "b")], "token_offset 1 where 0 was due in completion 0"),
    ],
)
def test_repetition_that_differs_is_data_loss(
    server: ScriptedServer, driver: Driver, rest: list[Response], complaint: str
) -> None:
    def breaking(request: Any, context: grpc.ServicerContext) -> Iterator[Response]:
        yield started(n=2)
        yield delta(0, [5, 6], "ab")
        yield delta(0, [7], "x", index=1)
        yield finished(1, index=1)
        abort(context, grpc.StatusCode.UNAVAILABLE, "Socket closed")

    server.scripts.extend([breaking, sending(started(n=2), *rest)])
    with pytest.raises(DataLoss, match=complaint):
        driver.generate("hi", n=2)


def test_tenant_of_the_client_holds_where_a_call_names_none(server: ScriptedServer, driver: Driver) -> None:
    for settings, options in [({}, {}), ({"tenant": "mine"}, {}), ({"tenant": "mine"}, {"tenant": "other"})]:
        driver.settings = {**driver.settings, **settings}
        server.scripts.append(playing(TOKENS))
        driver.generate("hi", **options)
    assert server.tenants == [None, "mine", "other"]


def test_quota_is_returned_with_its_name_and_a_time(server: ScriptedServer, driver: Driver) -> None:
    info = error_details_pb2.ErrorInfo(
        reason="QUOTA_EXCEEDED", metadata={"tenant": "a", "quota": "tokens_per_minute", "limit": "60"}
    )
    retry = error_details_pb2.RetryInfo(retry_delay=Duration(seconds=12))
    server.scripts.append(refusing(grpc.StatusCode.RESOURCE_EXHAUSTED, "tenant a: no tokens left", info, retry))
    with pytest.raises(ResourceExhausted) as caught:
        driver.generate("hi", tenant="a")
    assert (caught.value.reason, caught.value.retry_after_s) == ("QUOTA_EXCEEDED", 12.0)
    assert caught.value.metadata["quota"] == "tokens_per_minute"


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"n": -1}, "decoding.n"),
        ({"best_of": 2**32}, "decoding.best_of"),
        ({"beam_search": BeamSearch(-2)}, "decoding.beam_search.width"),
        ({"logit_bias": {-1: 0.5}}, "sampling.logit_bias"),
        ({"logprobs": 1.5}, "sampling.logprobs"),
        ({"min_tokens": -1}, "stopping.min_tokens"),
        ({"priority": 2**40}, "priority"),
        ({"priority": 0.5}, "priority"),
    ],
)
def test_what_the_wire_cannot_carry_is_refused_by_field(driver: Driver, options: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        driver.generate("hi", **options)
    assert [violation.field for violation in caught.value.field_violations] == [field]


@pytest.mark.parametrize(
    ("responses", "complaint"),
    [
        ([started()], "1 completions where 2 were requested"),
        ([started(n=2**31)], "completions where 2 were requested"),
        ([started(n=2), finished(0), delta(0, [5], "a")], "delta after the end of completion 0"),
        ([started(n=2), finished(0), finished(0)], "finished after the end of completion 0"),
        (
            [started(n=2), finished(0), delta(0, [5], "a", index=1)],
            "after 1 tokens without saying why completion 1 did",
        ),
        (
            [started(n=2), delta(0, [5], "a"), delta(1, [6], "a", index=1)],
            "token_offset 1 where 0 was due in completion 1",
        ),
    ],
)
def test_completions_that_contradict_each_other_are_data_loss(
    server: ScriptedServer, driver: Driver, responses: list[Response], complaint: str
) -> None:
    server.scripts.append(sending(*responses))
    with pytest.raises(DataLoss, match=complaint):
        driver.generate("hi", n=2)
