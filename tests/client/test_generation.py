"""Streaming, deadlines and cancellation, with both clients."""

from __future__ import annotations

import asyncio
import gc
import json
from collections.abc import Iterator
from typing import Any

import grpc
import pytest
from motet import (
    AsyncClient,
    Cancelled,
    ChatMessage,
    Client,
    DataLoss,
    DeadlineExceeded,
    FinishReason,
    InvalidArgument,
    ToolCall,
)
from motet.v1 import types_pb2

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


def test_no_adapter_is_the_base_model(server: ScriptedServer, driver: Driver) -> None:
    server.scripts.append(playing(TOKENS))
    driver.generate("a", adapter=None)
    assert server.requests[0].adapter == ""


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
        ({"max_tokens": 0}, "stopping.max_tokens"),
        ({"top_k": 2**32}, "sampling.top_k"),
        ({"seed": 2**64}, "sampling.seed"),
        ({"max_tokens": 1.5}, "stopping.max_tokens"),
        ({"prompt": [1, -2]}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [{"role": "user"}]}, "prompt[0]"),
        ({"prompt": "a\ud800"}, "prompt"),
        ({"prompt": [{"role": 5, "content": "x"}]}, "prompt[0].role"),
        ({"prompt": [{"role": "user", "content": 5}]}, "prompt[0].content"),
        ({"adapter": 5}, "adapter"),
        ({"cache_salt": "\udc80"}, "cache_salt"),
        ({"stop": ["a", 5]}, "stopping.stop"),
        ({"timeout_s": "5"}, "timeout_s"),
        ({"timeout_s": None}, "timeout_s"),
    ],
)
def test_what_the_wire_cannot_carry_is_refused_by_field(driver: Driver, options: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        driver.generate(**options)
    assert [violation.field for violation in caught.value.field_violations] == [field]


def test_unknown_option_is_refused(driver: Driver) -> None:
    with pytest.raises(TypeError, match="knows no temprature"):
        driver.generate("a", temprature=1.0)


@pytest.mark.parametrize(
    ("responses", "complaint"),
    [
        ([started(), delta(0, [5], "a"), delta(2, [6], "b")], "token_offset 2 where 1"),
        ([started(), delta(0, [5], "a"), delta(0, [5], "a")], "token_offset 0 where 1"),
        ([delta(0, [5], "a")], "delta before started"),
        ([started(), started()], "started twice"),
        ([started(), delta(0, [5], "a")], "after 1 tokens without saying why"),
        ([started(), delta(0, [5], "a", index=1)], "completion 1"),
        ([started(), finished(0), delta(0, [5], "a")], "delta after the end"),
    ],
)
def test_a_stream_that_contradicts_itself_is_data_loss(
    server: ScriptedServer, driver: Driver, responses: list[Response], complaint: str
) -> None:
    server.scripts.append(sending(*responses))
    with pytest.raises(DataLoss, match=complaint):
        driver.generate()


def test_deadline_reaches_the_server_and_ends_the_call(server: ScriptedServer, driver: Driver) -> None:
    server.scripts.append(server.waiting_for_cancel())
    with pytest.raises(DeadlineExceeded, match=r"^no token came within timeout_s=1; allow more time$") as caught:
        driver.generate(timeout_s=1.0)
    assert caught.value.reason == "DEADLINE_EXCEEDED"
    assert server.cancelled.wait(10)
    assert server.time_remaining_s[0] <= 1.1  # gRPC rounds what it sends upwards; a default server time is infinite


def test_deadline_in_the_middle_says_how_much_came(server: ScriptedServer, driver: Driver) -> None:
    server.scripts.append(server.waiting_for_cancel(started(), delta(0, [5, 6], "ab")))
    with pytest.raises(
        DeadlineExceeded, match=r"^the completion had not ended, 2 tokens had come within timeout_s=0.5"
    ):
        driver.generate(timeout_s=0.5)


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


CALL = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": {"days": 3}}}
TOOL = {"type": "function", "function": {"name": "weather"}}


def test_conversations_in_the_form_of_openai_carry_tools_calls_and_parts(
    server: ScriptedServer, driver: Driver
) -> None:
    server.scripts.append(playing(TOKENS))
    driver.generate(
        [
            {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
            {"role": "assistant", "content": None, "tool_calls": [CALL], "reasoning_content": "I look."},
            {"role": "tool", "tool_call_id": "c1", "content": "rain", "name": "weather"},
            ChatMessage("assistant", "It ", tool_calls=[ToolCall("look")]),
        ],
        tools=[TOOL],
        template_kwargs={"enable_thinking": False},
        continue_final_message=True,
    )
    chat = server.requests[0].chat
    user, call, result, last = chat.messages
    assert [part.text for part in user.parts] == ["a", "b"] and not user.content
    assert (call.tool_calls[0].id, call.tool_calls[0].arguments) == (
        "c1",
        '{"days": 3}',
    ) and call.reasoning == "I look."
    assert (result.tool_call_id, result.name, result.content) == ("c1", "weather", "rain")
    assert (last.tool_calls[0].name, last.tool_calls[0].arguments) == ("look", "{}")
    assert json.loads(chat.tools) == [TOOL] and json.loads(chat.template_kwargs) == {"enable_thinking": False}
    assert chat.continue_final_message and not chat.HasField("add_generation_prompt")


def test_what_a_stream_carries_is_requested_and_read(server: ScriptedServer, driver: Driver) -> None:
    entry = types_pb2.TokenLogprobs(token_id=5, token=b"\xf0", top=[types_pb2.TokenLogprob(token_id=6, token=b"a")])
    with_bytes = delta(0, [5], "")
    with_bytes.delta.logprobs.append(entry)
    server.scripts.append(sending(started(), with_bytes, finished(1)))
    chunks, _ = driver.generate("a", logprobs=1, token_bytes=True, include_stop=True, skip_special_tokens=False)
    (found,) = chunks[0].logprobs
    assert (found.token, found.top[0].token) == (b"\xf0", b"a")
    output = server.requests[0].output
    assert output.token_bytes and output.include_stop and output.HasField("skip_special_tokens")
    server.scripts.append(playing(TOKENS))
    driver.generate("a")
    assert not server.requests[1].HasField("output")
    server.scripts.append(playing(TOKENS))
    driver.generate("a", delta_tokens=8, delta_wait_s=0.25)
    output = server.requests[2].output
    assert (output.delta_tokens, output.delta_wait.ToMilliseconds()) == (8, 250)
    for wait_s in (-1.0, float("nan"), float("inf"), 1e30):
        with pytest.raises(InvalidArgument, match="delta_wait"):
            driver.generate("a", delta_wait_s=wait_s)


@pytest.mark.parametrize(
    ("prompt", "options", "field"),
    [
        ("text", {"tools": [TOOL]}, "tools"),
        ([1, 2], {"continue_final_message": True}, "continue_final_message"),
        ([{"role": "user", "content": [{"type": "image_url"}]}], {}, "prompt[0].content[0]"),
        ([{"role": "user", "image": "x"}], {}, "prompt[0]"),
        ([{"content": "x"}], {}, "prompt[0]"),
        ([{"role": "assistant", "tool_calls": [{"type": "custom"}]}], {}, "prompt[0].tool_calls[0]"),
        ([{"role": "user", "content": "x"}], {"tools": [object()]}, "tools"),
    ],
)
def test_a_conversation_that_the_wire_cannot_carry_is_refused(
    driver: Driver, prompt: Any, options: dict[str, Any], field: str
) -> None:
    with pytest.raises(InvalidArgument) as caught:
        driver.generate(prompt, **options)
    assert [violation.field for violation in caught.value.field_violations] == [field]
