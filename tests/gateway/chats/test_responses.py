"""`/v1/responses` as the `openai` package uses it: items, the events of a stream, parsed texts, what is refused."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator
from typing import Any, Literal

import httpx
import jsonschema  # type: ignore[import-untyped]
import openai
import pytest
from motet import Chunk, Client, Unavailable
from pydantic import BaseModel, Field

from gateway.http.errors import Refusal
from gateway.openai.items.messages import ResponsesBody
from gateway.openai.items.output import ResponseOutput
from gateway.openai.items.stream import events_of
from gateway.openai.replies import Reply
from tests.gateway.chats.conftest import SCHEMAS, Chats

TOOLS: list[Any] = [{"type": "function", "name": "look_up", "parameters": {"type": "object"}, "strict": None}]
GIVEN: dict[str, Any] = {"input": "Is it raining?", "tools": TOOLS, "temperature": 0.0, "max_output_tokens": 64}
ARGUMENTS = {"city": "Oslo"}


@pytest.fixture
def api(system: tuple[Client, openai.OpenAI]) -> openai.OpenAI:
    return system[1]


def shown(items: Any) -> list[Any]:
    """Items without what differs between two responses."""
    found = []
    for item in items:
        content = [part.text for part in getattr(item, "content", None) or ()]
        found.append((item.type, item.status, content or (item.name, json.loads(item.arguments))))
    return found


WHOLE = [
    ("reasoning", "completed", ["Hm, weather."]),
    ("message", "completed", ["I look."]),
    ("function_call", "completed", ("look_up", ARGUMENTS)),
    ("function_call", "completed", ("now", {})),
]


def test_a_response_has_items_usage_and_the_requests_fields(api: openai.OpenAI) -> None:
    response = api.responses.create(model="plain", instructions="Be brief.", metadata={"a": "b"}, **GIVEN)
    assert shown(response.output) == WHOLE and response.output_text == "I look."
    assert (response.status, response.model, response.object) == ("completed", "plain", "response")
    assert (response.instructions, response.metadata, response.error) == ("Be brief.", {"a": "b"}, None)
    assert len({item.id for item in response.output}) == 4 and response.id.startswith("resp_")
    usage = response.usage
    assert usage is not None and usage.total_tokens == usage.input_tokens + usage.output_tokens
    assert 0 < usage.output_tokens_details.reasoning_tokens < usage.output_tokens


def test_the_events_of_a_stream_are_complete_and_in_order(api: openai.OpenAI) -> None:
    with api.responses.create(model="plain", stream=True, **GIVEN) as stream:
        events = list(stream)
    assert [event.sequence_number for event in events] == list(range(len(events)))
    kinds = [event.type.removeprefix("response.") for event in events]
    assert kinds[:2] == ["created", "in_progress"] and kinds[-1] == "completed"
    runs = [kind for kind, before in zip(kinds, ["", *kinds], strict=False) if kind != before]
    texts = ["content_part.added", "{}.delta", "{}.done", "content_part.done"]
    call = ["output_item.added", *(f"function_call_arguments.{end}" for end in ("delta", "done")), "output_item.done"]
    expected = ["created", "in_progress"]
    for part in ("reasoning_text", "output_text"):
        expected += ["output_item.added", *(text.format(part) for text in texts), "output_item.done"]
    assert runs == [*expected, *call, *call, "completed"]
    last: Any = events[-1]
    assert shown(last.response.output) == WHOLE
    # Deltas are the items, and every event names its item.
    for index, item in enumerate(last.response.output):
        own: list[Any] = [event for event in events if getattr(event, "output_index", None) == index]
        deltas = "".join(event.delta for event in own if event.type.endswith(".delta"))
        assert deltas == (item.arguments if item.type == "function_call" else item.content[0].text)
        assert {event.item_id for event in own if hasattr(event, "item_id")} == {item.id}
        assert own[0].item.status == "in_progress" and own[-1].item == item


def test_the_streams_helper_accumulates_the_same(api: openai.OpenAI) -> None:
    with api.responses.stream(model="plain", **GIVEN) as stream:
        for _ in stream:
            pass
        response = stream.get_final_response()
    assert shown(response.output) == WHOLE


def test_what_came_is_sent_back_with_results_and_gives_the_next_turn(api: openai.OpenAI) -> None:
    first = api.responses.create(model="plain", **GIVEN)
    items: list[Any] = [{"role": "user", "content": [{"type": "input_text", "text": "Is it raining?"}]}]
    items += [item.model_dump(exclude_none=True) for item in first.output]
    items += [
        {"type": "function_call_output", "call_id": item.call_id, "output": "rain"}
        for item in first.output
        if item.type == "function_call"
    ]
    second = api.responses.create(model="plain", **{**GIVEN, "input": items})
    assert shown(second.output) == [("message", "completed", ["It rains."])]


@pytest.mark.parametrize("stream", [False, True])
def test_a_limit_makes_the_response_incomplete(api: openai.OpenAI, stream: bool) -> None:
    given: dict[str, Any] = {**GIVEN, "model": "plain", "max_output_tokens": 11}
    if stream:
        with api.responses.create(**given, stream=True) as events:
            last: Any = list(events)[-1]
        assert last.type == "response.incomplete"
        response = last.response
    else:
        response = api.responses.create(**given)
    assert response.status == "incomplete" and response.incomplete_details.reason == "max_output_tokens"
    call = response.output[-1]
    assert (call.type, call.status, call.arguments) == ("function_call", "incomplete", '{"city": "Os')


class Verdict(BaseModel):
    word: str = Field(max_length=5)
    kind: Literal["a", "b"]


def test_a_text_is_parsed_as_the_class_that_the_format_was_made_from(chats: Chats) -> None:
    response = chats.api.responses.parse(
        model="hermes", input="One word.", text_format=Verdict, max_output_tokens=400, extra_body={"seed": 1}
    )
    assert isinstance(response.output_parsed, Verdict) and response.output_parsed.kind in ("a", "b")
    with chats.api.responses.stream(
        model="hermes", input="One word.", text_format=Verdict, max_output_tokens=400, extra_body={"seed": 1}
    ) as stream:
        assert stream.get_final_response().output_parsed == response.output_parsed


@pytest.mark.parametrize("form", ["hermes", "llama3", "pythonic"])
def test_required_functions_are_called_with_valid_arguments(chats: Chats, form: str) -> None:
    tools: list[Any] = [{"type": "function", "name": "weather", "parameters": SCHEMAS["weather"], "strict": True}]
    choices: list[Any] = ["required", {"type": "function", "name": "weather"}]
    for choice in choices:
        response = chats.api.responses.create(
            model=form, input="Rain?", tools=tools, tool_choice=choice, parallel_tool_calls=False, max_output_tokens=400
        )
        [call] = response.output
        assert call.type == "function_call" and response.status == "completed"
        jsonschema.validate(json.loads(call.arguments), SCHEMAS["weather"])


def test_logprobs_come_with_the_text_on_request(chats: Chats) -> None:
    given: dict[str, Any] = {"model": "silent", "input": "Hello", "max_output_tokens": 8, "temperature": 0.0}
    given |= {"include": ["message.output_text.logprobs"], "top_logprobs": 2}
    response: Any = chats.api.responses.create(**given)
    [message] = response.output
    logprobs = message.content[0].logprobs
    assert len(logprobs) == 8 and all(len(each.top_logprobs) == 2 for each in logprobs)
    with chats.api.responses.create(**given, stream=True) as stream:
        events: list[Any] = list(stream)
    streamed = [each.logprob for event in events if event.type.endswith("text.delta") for each in event.logprobs]
    assert streamed == [each.logprob for each in logprobs]


REFUSED: list[tuple[str, dict[str, Any]]] = [
    ("previous_response_id", {"previous_response_id": "resp_1"}),
    ("conversation", {"conversation": "conv_1"}),
    ("store", {"store": True}),
    ("background", {"background": True}),
    ("truncation", {"truncation": "auto"}),
    ("reasoning", {"reasoning": {"effort": "high"}}),
    ("include", {"include": ["reasoning.encrypted_content"]}),
    ("top_logprobs", {"top_logprobs": 2}),
    ("text.format.schema", {"text": {"format": {"type": "json_schema", "name": "a"}}}),
    ("prompt", {"prompt": {"id": "p"}}),
    ("max_tool_calls", {"max_tool_calls": 1}),
    ("context_management", {"extra_body": {"context_management": []}}),
    ("tools[0].type", {"tools": [{"type": "web_search"}]}),
    ("tool_choice", {"tool_choice": "required", "tools": []}),
    ("text.format.schema", {"text": {"format": {"type": "json_schema", "name": "a", "schema": 1}}}),
    ("text.verbosity", {"text": {"verbosity": "low"}}),
    ("input", {"input": []}),
    ("input[0].type", {"input": [{"type": "item_reference", "id": "a"}]}),
    ("input[0].content[0]", {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "a"}]}]}),
    ("input[0].call_id", {"input": [{"type": "function_call", "name": "a", "arguments": "{}"}]}),
    (
        "input[1].arguments",
        {
            "input": [
                {"type": None, "role": "user", "content": "a"},
                {"type": "function_call", "call_id": "c", "name": "f", "arguments": "bad"},
            ]
        },
    ),
    (
        "tools[0].parameters",
        {
            "tools": [{"type": "function", "name": "f", "parameters": {"$ref": "#/$defs/none"}, "strict": True}],
            "tool_choice": "required",
        },
    ),
    ("max_output_tokens", {"max_output_tokens": -1}),
]


@pytest.mark.parametrize(("param", "options"), REFUSED, ids=[param for param, _ in REFUSED])
def test_what_is_not_served_is_refused_by_name(api: openai.OpenAI, param: str, options: dict[str, Any]) -> None:
    given = {"model": "plain", "input": "Hello", **options}
    for stream in (False, True):
        with pytest.raises(openai.BadRequestError) as caught:
            api.responses.create(**given, stream=stream)
        assert caught.value.param == param, caught.value.message


def test_neutral_values_are_taken(api: openai.OpenAI) -> None:
    response = api.responses.create(
        model="plain", store=False, background=False, truncation="disabled", service_tier="auto", user="u",
        reasoning={"effort": None}, text={"format": {"type": "text"}}, safety_identifier="s", prompt_cache_key="p",
        extra_body={"context_management": None, "a_field_of_the_future": None},
        **GIVEN,
    )  # fmt: skip
    assert response.status == "completed"


def test_an_unknown_model_is_not_found_and_a_stream_has_no_done(api: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError):
        api.responses.create(model="nobody", input="Hello", stream=True)
    body = {"model": "plain", "input": "Hello", "stream": True, "max_output_tokens": 4}
    text = httpx.post(f"{api.base_url}responses", json=body, timeout=60).text
    assert "[DONE]" not in text and text.startswith("event: response.created\ndata: {")


def test_an_error_behind_the_first_event_fails_the_response() -> None:
    body = ResponsesBody(model="m", input="Hello")
    reply = Reply("m", is_chat=True, n=1, prefix="resp_")

    async def chunks(*, has_begun: bool) -> AsyncGenerator[tuple[int, Chunk, str], None]:
        if has_begun:
            yield 0, Chunk("Hm", (5,), 0, ""), "f"
        raise Unavailable("the worker was lost")

    async def read(*, has_begun: bool) -> list[dict[str, Any]]:
        output = ResponseOutput(body, reply)
        return [event async for event in events_of(output, reply, chunks(has_begun=has_begun))]

    events = asyncio.run(read(has_begun=True))
    assert [event["type"] for event in events][-2:] == ["response.output_text.delta", "response.failed"]
    error = events[-1]["response"]["error"]
    assert error == {"code": "server_error", "message": "the worker was lost"}
    with pytest.raises(Refusal) as caught:
        asyncio.run(read(has_begun=False))
    assert caught.value.status == 503
