"""Calls that a request requires: of a model with random weights every one is valid, in each form of a template."""

from __future__ import annotations

import json
from typing import Any

import jsonschema  # type: ignore[import-untyped]
import openai
import pytest
from motet import Client, Lark
from motet.responses import CallArguments, CallStart, call_grammar, find_form

from tests.gateway.chats.conftest import SCHEMAS, TOOLS, Chats

FORMS = ["hermes", "llama3", "mistral", "mistral-args", "pythonic"]
GIVEN: dict[str, Any] = {
    "messages": [{"role": "user", "content": "Is it raining?"}],
    "tools": TOOLS,
    "max_tokens": 400,
    "temperature": 1.0,
}


def named(name: str) -> Any:
    return {"type": "function", "function": {"name": name}}


def without_space(chats: Chats) -> dict[str, int]:
    """Space is optional everywhere; random weights write little else without this bias."""
    ids = chats.client.model.tokenize(" \n\r\t\x1c\x1d\x1e\x1f\x0b\x0c", add_special_tokens=False).token_ids
    return {str(token_id): -100 for token_id in ids}


def calls_of(choice: Any) -> list[Any]:
    return list(choice.message.tool_calls or ())


def valid(name: str, arguments: str) -> str:
    jsonschema.validate(json.loads(arguments), SCHEMAS[name])
    return name


@pytest.mark.parametrize("form", FORMS)
def test_every_completion_is_a_valid_call(chats: Chats, form: str) -> None:
    given: dict[str, Any] = {**GIVEN, "tool_choice": "required", "parallel_tool_calls": False, "n": 8, "seed": 3}
    reply = chats.api.chat.completions.create(model=form, **given)
    for choice in reply.choices:
        [call] = calls_of(choice)
        valid(call.function.name, call.function.arguments)
        assert (choice.message.content, choice.finish_reason) == (None, "tool_calls")


@pytest.mark.parametrize("form", FORMS)
def test_a_function_by_name_is_called_once_and_the_reason_is_stop(chats: Chats, form: str) -> None:
    reply = chats.api.chat.completions.create(model=form, tool_choice=named("weather"), n=4, seed=1, **GIVEN)
    for choice in reply.choices:
        [call] = calls_of(choice)
        assert valid(call.function.name, call.function.arguments) == "weather" and choice.finish_reason == "stop"


@pytest.mark.parametrize("form", ["mistral", "pythonic"])
def test_several_calls_come_where_they_may(chats: Chats, form: str) -> None:
    given = {**GIVEN, "tools": TOOLS[1:], "logit_bias": without_space(chats)}
    reply = chats.api.chat.completions.create(model=form, tool_choice="required", n=8, seed=2, **given)
    done = [choice for choice in reply.choices if choice.finish_reason == "tool_calls"]
    counts = [len(calls_of(choice)) for choice in done]
    assert len(done) >= 4 and max(counts) > 1 and min(counts) >= 1
    for choice in done:
        assert choice.message.content is None
        for call in calls_of(choice):
            valid(call.function.name, call.function.arguments)


@pytest.mark.parametrize("form", FORMS)
def test_arguments_are_streamed_as_they_are_generated(chats: Chats, form: str) -> None:
    given = {**GIVEN, "tool_choice": named("weather"), "seed": 5, "model": form}
    with chats.api.chat.completions.create(stream=True, **given) as stream:
        deltas = [chunk.choices[0].delta for chunk in stream]
    pieces = [call for delta in deltas for call in delta.tool_calls or ()]
    assert pieces[0].function is not None and pieces[0].function.name == "weather"
    texts = [piece.function.arguments or "" for piece in pieces if piece.function]
    valid("weather", "".join(texts))
    assert len([text for text in texts if text]) >= (2 if form == "pythonic" else 8) and not any(
        delta.content for delta in deltas
    )


def test_allowed_tools_are_a_part_of_the_tools(chats: Chats) -> None:
    allowed: Any = {"mode": "required", "tools": [named("now")]}
    choice: Any = {"type": "allowed_tools", "allowed_tools": allowed}
    reply = chats.api.chat.completions.create(model="hermes", tool_choice=choice, n=4, seed=1, **GIVEN)
    for each in reply.choices:
        assert {call.function.name for call in calls_of(each)} == {"now"}


def test_reasoning_that_the_prompt_begins_is_not_cut_short_by_the_call(chats: Chats) -> None:
    given: dict[str, Any] = {**GIVEN, "tool_choice": named("now"), "max_tokens": 16, "n": 4, "seed": 1}
    given["logit_bias"] = without_space(chats)
    for choice in chats.api.chat.completions.create(model="thinker", **given).choices:
        assert (choice.message.model_extra or {})["reasoning_content"] and not calls_of(choice)
        assert choice.finish_reason == "length"


def test_strict_functions_alone_leave_text_free_and_hold_for_every_call(chats: Chats) -> None:
    tools = [{"type": "function", "function": {"name": "weather", "parameters": SCHEMAS["weather"], "strict": True}}]
    given = {**GIVEN, "tools": tools, "max_tokens": 200, "n": 8, "seed": 7}
    mark = chats.client.model.tokenize("<tool_call>", add_special_tokens=False).token_ids
    assert len(mark) == 1
    # The mark is made likely, so that calls begin; what follows it is the grammar's.
    reply = chats.api.chat.completions.create(model="hermes", logit_bias={str(mark[0]): 4}, **given)
    calls = [
        call
        for choice in reply.choices
        for call in calls_of(choice)[: None if choice.finish_reason != "length" else -1]
    ]
    assert calls and any(choice.message.content for choice in reply.choices)
    assert {valid(call.function.name, call.function.arguments) for call in calls} == {"weather"}


REFUSED: list[tuple[str, str, dict[str, Any]]] = [
    ("silent", "tool_choice", {"tool_choice": "required"}),
    ("hermes", "tool_choice", {"tool_choice": named("other")}),
    ("hermes", "tool_choice", {"tool_choice": "any"}),
    ("hermes", "tool_choice", {"tool_choice": "required", "tools": []}),
    ("llama3", "response_format", {"response_format": {"type": "json_object"}}),
    ("silent", "response_format", {"response_format": {"type": "json_object"}}),
    ("hermes", "response_format", {"response_format": {"type": "json_schema", "json_schema": {
        "name": "a", "schema": {"type": "string", "format": "colour"}}}}),
    ("hermes", "structured_outputs", {"extra_body": {"structured_outputs": {"regex": "(?=a)b"}}}),
    ("hermes", "tools[0].function.parameters", {"tool_choice": "required", "tools": [{"type": "function", "function": {
        "name": "a", "parameters": {"type": "object", "properties": {"b": {"type": "string", "format": "colour"}}}}}]}),
    ("hermes", "tools[0].function.parameters.type", {"tool_choice": "required", "tools": [
        {"type": "function", "function": {"name": "a", "parameters": {"type": "string"}}}]}),
    ("hermes", "tools[1].function.name", {"tool_choice": "required", "tools": [TOOLS[0], TOOLS[0]]}),
    ("pythonic", "tools[0].function", {"tool_choice": "required", "tools": [
        {"type": "function", "function": {"name": "not-python"}}]}),
    ("pythonic", "tools[0].function.parameters", {"tool_choice": "required", "tools": [
        {"type": "function", "function": {"name": "a", "parameters": {"type": "object", "minProperties": 1}}}]}),
    ("hermes", "continue_final_message", {"tool_choice": "required", "extra_body": {
        "continue_final_message": True, "add_generation_prompt": False}}),
]  # fmt: skip


@pytest.mark.parametrize(("model", "param", "options"), REFUSED)
def test_what_cannot_be_kept_is_refused_by_name(chats: Chats, model: str, param: str, options: dict[str, Any]) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        chats.api.chat.completions.create(model=model, **{**GIVEN, **options})
    assert caught.value.param == param, caught.value.message


def test_users_of_grpc_require_calls_with_the_same_grammar(chats: Chats) -> None:
    client: Client = chats.client
    form = find_form(client, "llama3")
    assert form is not None
    grammar = call_grammar(form, TOOLS, is_required=True, names=["weather"])
    assert grammar is not None
    text = client.generate(
        GIVEN["messages"],
        adapter="llama3",
        tools=TOOLS,
        constraint=Lark(grammar),
        max_tokens=400,
        temperature=1.0,
        seed=1,
        skip_special_tokens=False,
    )
    parser = form.parser()
    events = [event for chunk in text for event in parser.push(chunk.text)] + parser.finish()
    assert [event.name for event in events if isinstance(event, CallStart)] == ["weather"]
    valid("weather", "".join(event.text for event in events if isinstance(event, CallArguments)))


@pytest.mark.parametrize(
    ("form", "param"),
    [
        ("hermes", "tools[1].function.parameters"),
        ("mistral-args", "tools[1].function.parameters"),
        ("pythonic", "tools[1].function.parameters.properties.day"),
    ],
)
@pytest.mark.parametrize("choice", ["required", named("rain")])
def test_a_schema_that_cannot_be_followed_is_named(chats: Chats, form: str, param: str, choice: Any) -> None:
    rain = {"type": "object", "properties": {"city": {"type": "string"}, "day": {"items": {"not": {}}}}}
    tools: Any = [TOOLS[0], {"type": "function", "function": {"name": "rain", "parameters": rain}}]
    with pytest.raises(openai.BadRequestError) as caught:
        chats.api.chat.completions.create(model=form, tool_choice=choice, **{**GIVEN, "tools": tools})
    place = "/items/not" if form == "pythonic" else "/properties/day/items/not"
    assert caught.value.param == param
    assert f'{param}: "not" is not supported at {place}; leave it out' in caught.value.message
