"""A generation that breaks: it is sent again or continued, or it says why not, with both clients."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any

import grpc
import pytest
from google.protobuf.duration_pb2 import Duration
from google.protobuf.timestamp_pb2 import Timestamp
from google.rpc import error_details_pb2
from motet import (
    ChatMessage,
    DataLoss,
    FailedPrecondition,
    ResourceExhausted,
    RetryPolicy,
    Unavailable,
)
from motet.v1 import generation_pb2, types_pb2

from tests.client.conftest import Driver
from tests.client.scripted_server import (
    DIGEST,
    SEED,
    WORKER_LOST,
    Response,
    ScriptedServer,
    abort,
    delta,
    finished,
    playing,
    started,
    text_of,
)
from tests.client.test_generation import TEXT, TOKENS, refusing, sending


@pytest.mark.parametrize("break_at", range(1, len(TOKENS)))
def test_broken_stream_is_continued_without_loss_or_repetition(
    server: ScriptedServer, driver: Driver, break_at: int
) -> None:
    server.scripts.extend([playing(TOKENS, break_after=break_at, lag=2), playing(TOKENS, per_delta=2, lag=2)])
    chunks, result = driver.generate("hi", adapter="pirate", temperature=0.5)
    assert result.token_ids == tuple(TOKENS) and result.text == TEXT
    assert [token for chunk in chunks for token in chunk.token_ids] == TOKENS
    assert "".join(chunk.text for chunk in chunks) == TEXT
    resumed = server.requests[1]
    assert list(resumed.resume_from.ids) == TOKENS[:break_at]
    assert (resumed.adapter, resumed.adapter_digest, resumed.sampling.seed) == ("pirate", DIGEST, SEED)
    assert (resumed.text, resumed.sampling.temperature, resumed.stopping.max_tokens) == ("hi", 0.5, 8)
    assert len(driver.sleeps) == 1 and 0.01 <= driver.sleeps[0] <= 0.02


def test_text_flushed_without_tokens_is_not_repeated_by_the_continuation(
    server: ScriptedServer, driver: Driver
) -> None:
    server.scripts.extend([playing(TOKENS, lag=2, flush_first=True), playing(TOKENS, lag=2)])
    _, result = driver.generate()
    assert result.text == TEXT and result.token_ids == tuple(TOKENS)


def test_continuation_with_other_text_is_refused(server: ScriptedServer, driver: Driver) -> None:
    server.scripts.append(playing(TOKENS, lag=2, flush_first=True))
    server.scripts.append(sending(started(), delta(8, [], "other"), finished(8)))
    with pytest.raises(DataLoss, match="text differs"):
        driver.generate()


def test_attempts_without_progress_are_bounded_and_progress_renews_them(server: ScriptedServer, driver: Driver) -> None:
    server.scripts.extend(playing(TOKENS, break_after=n) for n in (1, 2, 3, 4, 5, 6))
    server.scripts.extend(playing(TOKENS, break_after=6) for _ in range(3))
    with pytest.raises(Unavailable, match="worker was lost"):
        driver.generate()
    assert not server.scripts, "six breaks with progress, then three more attempts without"


def test_deadline_spans_all_continuations(server: ScriptedServer, driver: Driver) -> None:
    server.scripts.extend(playing(TOKENS, break_after=n) for n in (1, 2))
    retry = error_details_pb2.RetryInfo(retry_delay=Duration(seconds=30))

    def breaking_politely(request: Any, context: grpc.ServicerContext) -> Iterator[Response]:
        yield started()
        yield delta(2, [TOKENS[2]], text_of(TOKENS[2]))
        abort(context, grpc.StatusCode.UNAVAILABLE, "drained", retry)

    server.scripts.append(breaking_politely)
    server.scripts.append(playing(TOKENS))
    driver.generate(timeout_s=600.0)
    assert driver.sleeps[2] == 30.0, "the server's wish is a lower bound"
    assert server.time_remaining_s[2] > 590 and server.time_remaining_s[3] < 570


def test_wait_beyond_the_deadline_is_not_begun_and_the_cause_is_raised(server: ScriptedServer, driver: Driver) -> None:
    retry = error_details_pb2.RetryInfo(retry_delay=Duration(seconds=30))

    def breaking(request: Any, context: grpc.ServicerContext) -> Iterator[Response]:
        yield started()
        yield delta(0, [5], "<5>")
        abort(context, grpc.StatusCode.UNAVAILABLE, "drained", retry)

    server.scripts.append(breaking)
    with pytest.raises(Unavailable, match=r"^drained; not tried again: 25 s are left of timeout_s=25$") as caught:
        driver.generate(timeout_s=25.0)
    assert caught.value.retry_after_s == 30.0 and driver.sleeps == []


def test_full_queue_that_requests_a_wait_beyond_the_deadline_is_raised(server: ScriptedServer, driver: Driver) -> None:
    retry = error_details_pb2.RetryInfo(retry_delay=Duration(seconds=40))
    server.scripts.append(playing(TOKENS, break_after=3))
    server.scripts.append(refusing(grpc.StatusCode.RESOURCE_EXHAUSTED, "queue full", retry))
    with pytest.raises(
        ResourceExhausted, match=r"^queue full; not tried again: 20 s are left of timeout_s=20$"
    ) as caught:
        driver.generate(timeout_s=20.0)
    assert caught.value.retry_after_s == 40.0


def test_full_queue_at_a_continuation_is_waited_for(server: ScriptedServer, driver: Driver) -> None:
    retry = error_details_pb2.RetryInfo(retry_delay=Duration(seconds=2))
    server.scripts.append(playing(TOKENS, break_after=3))
    server.scripts.append(refusing(grpc.StatusCode.RESOURCE_EXHAUSTED, "queue full", retry))
    server.scripts.append(playing(TOKENS))
    _, result = driver.generate()
    assert result.token_ids == tuple(TOKENS) and driver.sleeps[1] == 2.0


def test_slow_consumer_and_full_queue_at_first_are_final(server: ScriptedServer, driver: Driver) -> None:
    retry = error_details_pb2.RetryInfo(retry_delay=Duration(seconds=2))

    def slow(request: Any, context: grpc.ServicerContext) -> Iterator[Response]:
        yield started()
        yield delta(0, [5], "<5>")
        abort(context, grpc.StatusCode.RESOURCE_EXHAUSTED, "slow consumer", retry)

    server.scripts.extend([slow, refusing(grpc.StatusCode.RESOURCE_EXHAUSTED, "queue full", retry)])
    with pytest.raises(ResourceExhausted, match="slow"):
        driver.generate()
    with pytest.raises(ResourceExhausted, match="queue full") as caught:
        driver.generate()
    assert caught.value.retry_after_s == 2.0 and driver.sleeps == []


@pytest.mark.parametrize("options", [{}, {"n": 2}])
def test_unavailable_before_the_first_token_is_tried_again(
    server: ScriptedServer, driver: Driver, options: dict[str, Any]
) -> None:
    server.scripts.extend([refusing(grpc.StatusCode.UNAVAILABLE, "no worker", WORKER_LOST)] * 3)
    n = options.get("n", 1)
    server.scripts.append(sending(started(n=n), *(finished(0, index=index) for index in range(n))))
    _, result = driver.generate(**options)
    assert len(result.completions) == n and len(server.requests) == 4
    assert all(len(request.resume_from.ids) == 0 for request in server.requests)
    assert len(driver.sleeps) == 3


def test_unavailable_that_the_server_returns_ends_after_the_bounded_attempts(
    server: ScriptedServer, driver: Driver
) -> None:
    server.scripts.extend([refusing(grpc.StatusCode.UNAVAILABLE, "no worker is attached", WORKER_LOST)] * 4)
    with pytest.raises(Unavailable, match=r"^no worker is attached$"):
        driver.generate()
    assert len(server.requests) == 4


def test_connection_that_breaks_time_and_again_is_tried_until_the_deadline(
    server: ScriptedServer, driver: Driver
) -> None:
    """Nobody answered, so that the bound of attempts does not count: RETRY allows four."""
    server.scripts.extend([refusing(grpc.StatusCode.UNAVAILABLE, "Socket closed")] * 20)
    server.scripts.append(playing(TOKENS))
    _, result = driver.generate(timeout_s=5.0)
    assert result.text == TEXT and len(server.requests) == 21
    server.scripts.extend([refusing(grpc.StatusCode.UNAVAILABLE, "Socket closed")] * 200)
    with pytest.raises(Unavailable, match=r"the connection broke to the server at .*: Socket closed; not tried again"):
        driver.generate(timeout_s=2.0)
    assert sum(driver.sleeps) > 1.9, "it is tried until there is no time for another attempt"


def test_server_that_shuts_down_is_waited_for_like_one_that_is_away(server: ScriptedServer, driver: Driver) -> None:
    draining = error_details_pb2.ErrorInfo(reason="DRAINING")
    server.scripts.extend([refusing(grpc.StatusCode.UNAVAILABLE, "shutting down", draining)] * 9)
    server.scripts.append(playing(TOKENS))
    _, result = driver.generate()
    assert result.text == TEXT and len(driver.sleeps) == 9


def test_one_attempt_means_no_second_one_for_any_reason(server: ScriptedServer, driver: Driver) -> None:
    driver.settings["retry"] = RetryPolicy(max_attempts=1)
    server.scripts.append(refusing(grpc.StatusCode.UNAVAILABLE, "Socket closed"))
    with pytest.raises(Unavailable):
        driver.generate()
    server.scripts.append(playing(TOKENS, break_after=3))
    with pytest.raises(Unavailable):
        driver.generate()
    driver.target = "127.0.0.1:1"
    with pytest.raises(Unavailable):
        driver.generate()
    assert len(server.requests) == 2 and driver.sleeps == []


@pytest.mark.parametrize("num_returned", [0, 3])
def test_cancelled_that_nobody_requested_is_tried_again(
    server: ScriptedServer, driver: Driver, num_returned: int
) -> None:
    """A server whose port closes cancels what it has taken from the wire."""

    def cancelling(request: Any, context: grpc.ServicerContext) -> Iterator[Response]:
        if num_returned:
            yield started()
            yield delta(0, TOKENS[:num_returned], "".join(text_of(token) for token in TOKENS[:num_returned]))
        abort(context, grpc.StatusCode.CANCELLED, "")

    server.scripts.extend([cancelling, playing(TOKENS)])
    _, result = driver.generate()
    assert result.text == TEXT and result.token_ids == tuple(TOKENS)
    assert len(server.requests[1].resume_from.ids) == num_returned


@pytest.mark.parametrize("code", [grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED, grpc.StatusCode.INTERNAL])
@pytest.mark.parametrize("n", [1, 2])
def test_completion_that_came_whole_is_kept_though_the_stream_breaks(
    server: ScriptedServer, driver: Driver, code: grpc.StatusCode, n: int
) -> None:
    def breaking(request: Any, context: grpc.ServicerContext) -> Iterator[Response]:
        yield started(n=n)
        for index in range(n):
            yield delta(0, [5, 6], f"text {index}", index=index)
            yield finished(2, index=index)
        abort(context, code, "the connection broke before the status")

    server.scripts.append(breaking)
    _, result = driver.generate(n=n)
    assert [completion.text for completion in result.completions] == [f"text {index}" for index in range(n)]
    assert len(server.requests) == 1 and driver.sleeps == []


def test_server_that_never_responded_is_given_up_after_the_connect_timeout(driver: Driver) -> None:
    driver.target = "127.0.0.1:1"
    with pytest.raises(Unavailable) as caught:
        driver.generate()
    assert str(caught.value) == (
        "no Motet server responds at 127.0.0.1:1: Connection refused; given up after connect_timeout_s=10"
    )
    assert caught.value.reason == "SERVER_UNREACHABLE" and 9 < sum(driver.sleeps) < 10


def test_absence_of_a_server_that_was_there_may_be_bounded(server: ScriptedServer, driver: Driver) -> None:
    driver.settings["retry"] = RetryPolicy(max_absence_s=30.0)
    server.scripts.extend([refusing(grpc.StatusCode.UNAVAILABLE, "Socket closed")] * 100)
    with pytest.raises(Unavailable, match=r"given up after max_absence_s=30$"):
        driver.generate()
    assert 29 < sum(driver.sleeps) < 30


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ({"adapter_digest": "cd" * 32}, "adapter_digest"),
        ({"model_fingerprint": "cd" * 32}, "model_fingerprint"),
        ({"prompt_sha256": "cd" * 32}, "prompt_sha256"),
        ({"prompt_tokens": 9}, "prompt_tokens"),
        ({"sampling": {"seed": 12}}, "sampling.seed"),
        ({"sampling": {"temperature": 0.5}}, "sampling.temperature"),
        ({"sampling": {"logit_bias": {3: 1.0}}}, "sampling.logit_bias"),
        ({"stopping": {"max_tokens": 7}}, "stopping.max_tokens"),
        ({"stopping": {"stop": ["x"]}}, "stopping.stop"),
    ],
)
def test_continuation_of_another_stream_is_refused(
    server: ScriptedServer, driver: Driver, change: dict[str, Any], name: str
) -> None:
    second = started()
    second.started.MergeFrom(generation_pb2.GenerationStarted(**change))
    server.scripts.extend([playing(TOKENS, break_after=2), sending(second, delta(2, [7], "<7>"), finished(3))])
    with pytest.raises(DataLoss, match=f"continued with {name} "):
        driver.generate()


def test_continuation_pins_what_the_server_chose_and_the_model_and_prompt_it_returned(
    server: ScriptedServer, driver: Driver
) -> None:
    first = started(
        model_fingerprint="12" * 32, prompt_sha256="34" * 32, render_time=Timestamp(seconds=77), max_tokens=3
    )
    first.started.sampling.MergeFrom(types_pb2.SamplingParams(temperature=0.25, top_k=300, min_p=0.5, logprobs=2))
    first.started.sampling.logit_bias[3] = 1.0
    first.started.stopping.MergeFrom(types_pb2.StoppingParams(min_tokens=2, stop=["z"]))

    def breaking(request: Any, context: grpc.ServicerContext) -> Iterator[Response]:
        yield first
        yield delta(0, [5], "<5>")
        abort(context, grpc.StatusCode.UNAVAILABLE, "the worker was lost", WORKER_LOST)

    server.scripts.extend([breaking, sending(first, delta(1, [6, 7], "<6><7>"), finished(3))])
    _, result = driver.generate(
        [ChatMessage("user", "hi")], min_p=0.5, logit_bias={3: 1.0}, stop=["z"], logprobs=2, prompt_logprobs=1
    )
    assert result.text == "<5><6><7>"
    assert (result.started.model_fingerprint, result.started.prompt_sha256) == ("12" * 32, "34" * 32)
    assert result.started.render_time == datetime(1970, 1, 1, 0, 1, 17, tzinfo=UTC)
    begun, resumed = server.requests
    assert not begun.HasField("preconditions") and not begun.chat.HasField("render_time")
    assert resumed.preconditions == generation_pb2.Preconditions(model_fingerprint="12" * 32, prompt_sha256="34" * 32)
    assert resumed.chat.render_time.seconds == 77
    assert resumed.sampling == first.started.sampling and resumed.stopping == first.started.stopping


def test_refusal_to_continue_on_another_model_is_raised_as_it_is(server: ScriptedServer, driver: Driver) -> None:
    info = error_details_pb2.ErrorInfo(reason="PRECONDITION_FAILED")
    server.scripts.append(playing(TOKENS, break_after=2))
    server.scripts.append(refusing(grpc.StatusCode.FAILED_PRECONDITION, "another model", info))
    with pytest.raises(FailedPrecondition, match="another model") as caught:
        driver.generate()
    assert caught.value.reason == "PRECONDITION_FAILED"
