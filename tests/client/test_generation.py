"""Streaming, continuation after a break, retries, deadlines and cancellation, with both clients."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any

import grpc
import pytest
from google.protobuf.duration_pb2 import Duration
from google.protobuf.timestamp_pb2 import Timestamp
from google.rpc import error_details_pb2  # type: ignore[import-untyped]
from motet import (
    AsyncClient,
    Cancelled,
    ChatMessage,
    Client,
    DataLoss,
    DeadlineExceeded,
    FailedPrecondition,
    FinishReason,
    InvalidArgument,
    ResourceExhausted,
    Unavailable,
)
from motet.v1 import generation_pb2, types_pb2

from tests.client.conftest import Driver
from tests.client.scripted_server import (
    DIGEST,
    SEED,
    Response,
    ScriptedServer,
    abort,
    delta,
    finished,
    playing,
    started,
    text_of,
)

TOKENS = [5, 6, 7, 8, 9, 10, 11, 12]
TEXT = "".join(text_of(token) for token in TOKENS)


def refusing(code: grpc.StatusCode, message: str = "not at present", *details: Any) -> Any:
    def script(request: Any, context: grpc.ServicerContext) -> Iterator[Response]:
        abort(context, code, message, *details)
        yield Response()

    return script


def sending(*responses: Response) -> Any:
    def script(request: Any, context: grpc.ServicerContext) -> Iterator[Response]:
        yield from responses

    return script


def test_stream_gives_text_tokens_offsets_digest_and_the_end(server: ScriptedServer, driver: Driver) -> None:
    server.scripts.append(playing(TOKENS, per_delta=3))
    chunks, result = driver.generate("hi", adapter="pirate")
    assert [chunk.token_offset for chunk in chunks] == [0, 3, 6, 8]
    assert [chunk.token_ids for chunk in chunks] == [(5, 6, 7), (8, 9, 10), (11, 12), ()]
    assert "".join(chunk.text for chunk in chunks) == TEXT == result.text
    assert {chunk.adapter_digest for chunk in chunks} == {DIGEST}
    assert [chunk.finish_reason for chunk in chunks] == [None, None, None, FinishReason.LENGTH]
    assert chunks[-1].usage is not None and chunks[-1].usage.completion_tokens == 8
    assert result.token_ids == tuple(TOKENS)
    assert (result.started.seed, result.started.prompt_tokens, result.started.top_k) == (SEED, 4, None)


@pytest.mark.parametrize(
    ("prompt", "field"),
    [
        ("plain", "text"),
        ([1, 2, 3], "token_ids"),
        ([ChatMessage("user", "hi")], "chat"),
        ([{"role": "user", "content": "hi"}], "chat"),
    ],
)
def test_prompt_kinds(server: ScriptedServer, driver: Driver, prompt: Any, field: str) -> None:
    server.scripts.append(playing(TOKENS))
    driver.generate(prompt)
    assert server.requests[0].WhichOneof("input") == field


def test_options_that_are_not_given_stay_unset_on_the_wire(server: ScriptedServer, driver: Driver) -> None:
    server.scripts.extend([playing(TOKENS), playing(TOKENS)])
    driver.generate("a")
    driver.generate("a", max_tokens=3, temperature=0.0, top_k=2, top_p=0.5, seed=0, stop="x", ignore_eos=False)
    bare, full = server.requests
    assert bare.sampling.ListFields() == [] and bare.stopping.ListFields() == []
    assert {name.name for name, _ in full.sampling.ListFields()} == {"temperature", "top_k", "top_p", "seed"}
    assert (list(full.stopping.stop), full.stopping.HasField("ignore_eos")) == (["x"], True)


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"max_tokens": -1}, "stopping.max_tokens"),
        ({"top_k": 2**32}, "sampling.top_k"),
        ({"seed": 2**64}, "sampling.seed"),
        ({"max_tokens": 1.5}, "stopping.max_tokens"),
        ({"prompt": [1, -2]}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [{"role": "user"}]}, "prompt[0]"),
    ],
)
def test_what_the_wire_cannot_carry_is_refused_by_field(driver: Driver, options: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        driver.generate(**options)
    assert [violation.field for violation in caught.value.field_violations] == [field]


def test_unknown_option_is_refused(driver: Driver) -> None:
    with pytest.raises(TypeError, match="knows no temprature"):
        driver.generate("a", temprature=1.0)


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


def test_no_continuation_is_tried_beyond_the_deadline(server: ScriptedServer, driver: Driver) -> None:
    retry = error_details_pb2.RetryInfo(retry_delay=Duration(seconds=30))

    def breaking(request: Any, context: grpc.ServicerContext) -> Iterator[Response]:
        yield started()
        yield delta(0, [5], "<5>")
        abort(context, grpc.StatusCode.UNAVAILABLE, "drained", retry)

    server.scripts.append(breaking)
    with pytest.raises(DeadlineExceeded, match=r"timeout_s=25.*after 1 tokens.*drained"):
        driver.generate(timeout_s=25.0)
    assert driver.sleeps == []


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


def test_unavailable_before_the_first_token_is_retried_by_grpc(server: ScriptedServer, driver: Driver) -> None:
    server.scripts.extend([refusing(grpc.StatusCode.UNAVAILABLE)] * 3)
    server.scripts.append(playing(TOKENS))
    _, result = driver.generate()
    assert result.text == TEXT and len(server.requests) == 4
    assert all(len(request.resume_from.ids) == 0 for request in server.requests)
    assert driver.sleeps == []


def test_unavailable_for_ever_ends_after_the_bounded_attempts(server: ScriptedServer, driver: Driver) -> None:
    server.scripts.extend([refusing(grpc.StatusCode.UNAVAILABLE)] * 4)
    with pytest.raises(Unavailable):
        driver.generate()
    assert len(server.requests) == 4


def test_nobody_listening_is_unavailable(driver: Driver) -> None:
    driver.target = "127.0.0.1:1"
    with pytest.raises(Unavailable):
        driver.generate()


@pytest.mark.parametrize(
    ("responses", "complaint"),
    [
        ([started(), delta(0, [5], "a"), delta(2, [6], "b")], "token_offset 2 where 1"),
        ([started(), delta(0, [5], "a"), delta(0, [5], "a")], "token_offset 0 where 1"),
        ([delta(0, [5], "a")], "delta before started"),
        ([started(), started()], "started twice"),
        ([started(), delta(0, [5], "a")], "after 1 tokens without saying why"),
        ([started(), delta(0, [5], "a", index=1)], "answer 1"),
        ([started(), finished(0), delta(0, [5], "a")], "delta after the end"),
    ],
)
def test_a_stream_that_contradicts_itself_is_data_loss(
    server: ScriptedServer, driver: Driver, responses: list[Response], complaint: str
) -> None:
    server.scripts.append(sending(*responses))
    with pytest.raises(DataLoss, match=complaint):
        driver.generate()


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


def test_continuation_pins_what_the_server_chose_and_the_model_and_prompt_it_told(
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
        abort(context, grpc.StatusCode.UNAVAILABLE, "the worker was lost")

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


def test_deadline_reaches_the_server_and_ends_the_call(server: ScriptedServer, driver: Driver) -> None:
    server.scripts.append(server.waiting_for_cancel())
    with pytest.raises(DeadlineExceeded):
        driver.generate(timeout_s=0.2)
    assert server.cancelled.wait(10)
    assert server.time_remaining_s[0] <= 0.3  # gRPC rounds what it sends upwards; a default server time is infinite


def test_leaving_with_cancels(server: ScriptedServer) -> None:
    server.scripts.append(server.waiting_for_cancel(started(), delta(0, [5], "a")))
    with Client(server.target) as client, client.generate("hi") as stream:
        assert next(stream).token_ids == (5,)
        stream.close()
        assert list(stream) == []
        assert server.cancelled.wait(10)
        with pytest.raises(Cancelled):
            stream.result()


def test_dropping_the_stream_after_break_cancels(server: ScriptedServer) -> None:
    server.scripts.append(server.waiting_for_cancel(started(), delta(0, [5], "a")))
    with Client(server.target) as client:
        for chunk in client.generate("hi"):
            assert chunk.text == "a"
            break
        gc.collect()
        assert server.cancelled.wait(10)


async def test_async_leaving_with_cancels(server: ScriptedServer) -> None:
    server.scripts.append(server.waiting_for_cancel(started(), delta(0, [5], "a")))
    async with AsyncClient(server.target) as client:
        async with client.generate("hi") as stream:
            async for chunk in stream:
                assert chunk.text == "a"
                break
        assert await asyncio.to_thread(server.cancelled.wait, 10)
        assert [chunk async for chunk in stream] == []


async def test_async_dropping_the_stream_cancels(server: ScriptedServer) -> None:
    server.scripts.append(server.waiting_for_cancel(started(), delta(0, [5], "a")))
    async with AsyncClient(server.target) as client:
        async for chunk in client.generate("hi"):
            assert chunk.text == "a"
            break
        gc.collect()
        assert await asyncio.to_thread(server.cancelled.wait, 10)


async def test_async_cancelled_task_cancels_the_request(server: ScriptedServer) -> None:
    server.scripts.append(server.waiting_for_cancel(started(), delta(0, [5], "a")))
    got_first = asyncio.Event()
    async with AsyncClient(server.target) as client:
        stream = client.generate("hi")

        async def consume() -> None:
            async for _ in stream:
                got_first.set()

        task = asyncio.create_task(consume())
        await asyncio.wait_for(got_first.wait(), 10)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert await asyncio.to_thread(server.cancelled.wait, 10)


async def test_async_close_by_another_task_ends_the_loop(server: ScriptedServer) -> None:
    server.scripts.append(server.waiting_for_cancel(started(), delta(0, [5], "a")))
    got_first = asyncio.Event()
    async with AsyncClient(server.target) as client:
        stream = client.generate("hi")

        async def consume() -> int:
            num_chunks = 0
            async for _ in stream:
                num_chunks += 1
                got_first.set()
            return num_chunks

        task = asyncio.create_task(consume())
        await asyncio.wait_for(got_first.wait(), 10)
        await stream.aclose()
        assert await asyncio.wait_for(task, 10) == 1
        assert await asyncio.to_thread(server.cancelled.wait, 10)
