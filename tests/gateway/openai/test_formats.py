"""`response_format` and `structured_outputs`: what they mean, what is refused, and that completions follow them."""

from __future__ import annotations

import json
import re
from typing import Any

import msgspec
import openai
import pytest
from motet import Choices, JsonObject, JsonSchema, Lark, Regex, StructuralTag, StructuralTags

from gateway.http.errors import Refusal
from gateway.openai.formats import constraint_of
from gateway.openai.messages import ChatBody
from tests.gateway.openai.conftest import PROMPT, Served

SCHEMA = {
    "type": "object",
    "properties": {"ok": {"type": "boolean"}, "n": {"enum": [1, 2]}},
    "required": ["ok", "n"],
    "additionalProperties": False,
}
MESSAGES = [{"role": "user", "content": "Who pays?"}]
TURNS: Any = MESSAGES
TAGS = {"structures": [{"begin": "<f>", "schema": SCHEMA, "end": "</f>"}], "triggers": ["<f"]}


def constraint(**fields: Any) -> Any:
    return constraint_of(msgspec.convert({"model": "m", "messages": MESSAGES, **fields}, ChatBody))


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, None),
        ({"response_format": {"type": "text"}}, None),
        ({"response_format": {"type": "json_object"}}, JsonObject()),
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "a", "strict": True, "schema": SCHEMA},
                }
            },
            JsonSchema(SCHEMA),
        ),
        ({"structured_outputs": {"json": SCHEMA}}, JsonSchema(SCHEMA)),
        ({"structured_outputs": {"json": json.dumps(SCHEMA)}}, JsonSchema(json.dumps(SCHEMA))),
        ({"structured_outputs": {"json_object": True, "regex": None}}, JsonObject()),
        ({"structured_outputs": {"json_object": True, "whitespace_pattern": None}}, JsonObject()),
        ({"structured_outputs": {"regex": "[ab]+"}}, Regex("[ab]+")),
        ({"structured_outputs": {"choice": ["yes", "no"]}}, Choices(["yes", "no"])),
        ({"structured_outputs": {"grammar": 'start: "a"'}}, Lark('start: "a"')),
        (
            {"structured_outputs": {"structural_tag": json.dumps(TAGS)}},
            StructuralTags([StructuralTag("<f", "<f>", "</f>", json_schema=SCHEMA)]),
        ),
        ({"response_format": {"type": "json_object"}, "tools": [{}], "tool_choice": "none"}, JsonObject()),
    ],
)
def test_both_fields_become_constraints(fields: dict[str, Any], expected: object) -> None:
    assert constraint(**fields) == expected


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"response_format": "json"}, "response_format: is not an object"),
        ({"response_format": {"type": "xml"}}, "response_format: has a type that is not"),
        ({"response_format": {"type": "json_schema"}}, "response_format: has no json_schema.schema"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": "x"}}},
            "has no json_schema.schema",
        ),
        ({"structured_outputs": []}, "structured_outputs: is not an object"),
        ({"structured_outputs": {}}, "structured_outputs: has 0 of"),
        ({"structured_outputs": {"regex": "a", "json_object": True}}, "structured_outputs: has 2 of"),
        ({"structured_outputs": {"ebnf": "a"}}, "structured_outputs: has 'ebnf'"),
        ({"structured_outputs": {"regex": 5}}, "structured_outputs: has a regex of a wrong type"),
        ({"structured_outputs": {"choice": [1]}}, "structured_outputs: has a choice of a wrong type"),
        ({"structured_outputs": {"structural_tag": "{"}}, "structured_outputs: has a structural_tag without"),
        ({"structured_outputs": {"structural_tag": {**TAGS, "triggers": ["x"]}}}, "no trigger that '<f>' begins with"),
        ({"structured_outputs": {"regex": "a"}, "response_format": {"type": "json_object"}}, "beside response_format"),
    ],
)
def test_what_is_no_constraint_is_refused_with_its_field(fields: dict[str, Any], said: str) -> None:
    with pytest.raises(Refusal, match=re.escape(said)):
        constraint(**fields)


@pytest.mark.parametrize("stream", [False, True])
def test_a_chat_completion_follows_the_schema_with_base_and_adapter(served: Served, stream: bool) -> None:
    for model in ("model", "legal"):
        response_format: Any = {"type": "json_schema", "json_schema": {"name": "payer", "schema": SCHEMA}}
        # A random model likes spaces between the parts as much as anything else.
        spaces = served.client.model.tokenize(" \n\t\r", add_special_tokens=False).token_ids
        arguments: dict[str, Any] = {"model": model, "messages": MESSAGES, "max_tokens": 60, "temperature": 1.0}
        arguments |= {"seed": 3, "logit_bias": {str(token): -100 for token in spaces}}
        if stream:
            chunks = list(served.api.chat.completions.create(stream=True, response_format=response_format, **arguments))
            text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
            reason = next(chunk.choices[0].finish_reason for chunk in reversed(chunks) if chunk.choices)
        else:
            choice = served.api.chat.completions.create(response_format=response_format, **arguments).choices[0]
            text, reason = choice.message.content or "", choice.finish_reason
        value = json.loads(text)
        assert set(value) == {"ok", "n"} and value["n"] in (1, 2) and isinstance(value["ok"], bool)
        assert reason == "stop"


def test_a_completion_is_one_of_the_choices(served: Served) -> None:
    reply = served.api.completions.create(
        model="medical",
        prompt=PROMPT,
        max_tokens=20,
        n=4,
        temperature=1.0,
        extra_body={"structured_outputs": {"choice": ["yes", "no"]}},
    )
    assert {choice.text for choice in reply.choices} <= {"yes", "no"}
    assert {choice.finish_reason for choice in reply.choices} == {"stop"}


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("response_format", {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "wrong"}}}),
        ("structured_outputs", {"regex": "(a"}),
        ("structured_outputs", {"choice": ["a"] * 100_000}),
    ],
)
def test_what_cannot_be_compiled_is_400_with_the_field(served: Served, field: str, value: Any) -> None:
    with pytest.raises(openai.BadRequestError) as raised:
        served.api.chat.completions.create(model="legal", messages=TURNS, extra_body={field: value})
    assert raised.value.param == field
