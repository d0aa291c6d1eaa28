"""What the content has to be, where a model reasons first and where a request offers tools."""

from __future__ import annotations

from typing import Any

import openai
import pytest
from motet import Client

from tests.gateway.chats.chained_system import GIVEN, MESSAGES, TOOLS

SCHEMA = {"type": "object", "properties": {"ok": {"const": True}}, "required": ["ok"], "additionalProperties": False}
FORMAT: Any = {"type": "json_schema", "json_schema": {"name": "given", "schema": SCHEMA}}
THOUGHT = "Hm, weather."


@pytest.fixture(scope="module")
def api(system: tuple[Client, openai.OpenAI]) -> openai.OpenAI:
    return system[1]


def reasoning_of(message: Any) -> str | None:
    text: str | None = (message.model_extra or {}).get("reasoning_content")
    return text


def without_space(client: Client) -> dict[str, int]:
    """A bias by which JSON is written without space: a chained model likes all tokens but one alike."""
    return {str(token): -100 for token in client.model.tokenize(" \n\t\r", add_special_tokens=False).token_ids}


@pytest.mark.parametrize("model", ["chained", "opened"])
def test_reasoning_comes_before_content_that_follows_a_schema(system: tuple[Client, openai.OpenAI], model: str) -> None:
    client, api = system
    given: Any = {"model": model, "temperature": 0.0, "logit_bias": without_space(client)}
    whole = api.chat.completions.create(messages=MESSAGES, max_tokens=64, response_format=FORMAT, **given).choices[0]
    assert (reasoning_of(whole.message), whole.message.content) == (THOUGHT, '{"ok":true}')
    assert whole.finish_reason == "stop"
    stream = api.chat.completions.create(messages=MESSAGES, max_tokens=64, response_format=FORMAT, stream=True, **given)
    deltas = [chunk.choices[0].delta for chunk in stream]
    assert "".join(delta.content or "" for delta in deltas) == '{"ok":true}'
    assert "".join(reasoning_of(delta) or "" for delta in deltas) == THOUGHT
    response = api.responses.create(
        model=model,
        input="Is it raining?",
        temperature=0.0,
        max_output_tokens=64,
        text={"format": {"type": "json_schema", "name": "given", "schema": SCHEMA}},
        extra_body={"logit_bias": given["logit_bias"]},
    )
    assert response.output_text == '{"ok":true}' and response.output[0].type == "reasoning"


@pytest.mark.parametrize(
    "outputs", [{"choice": ["I look."]}, {"regex": "I lo+k\\."}, {"grammar": 'start: "I " X\nX: "look."'}]
)
def test_every_form_of_a_constraint_holds_behind_reasoning(api: openai.OpenAI, outputs: dict[str, Any]) -> None:
    offers: list[dict[str, Any]] = [{}, {"tools": TOOLS}]
    for tools in offers:
        given: Any = {"messages": MESSAGES, "temperature": 0.0, "max_tokens": 64, **tools}
        reply = api.chat.completions.create(model="opened", extra_body={"structured_outputs": outputs}, **given)
        message = reply.choices[0].message
        assert (reasoning_of(message), message.content, message.tool_calls) == (THOUGHT, "I look.", None)


def test_a_call_may_come_in_place_of_content_that_follows_a_schema(api: openai.OpenAI) -> None:
    tools: Any = [{"type": "function", "function": {"name": "sing", "parameters": {"type": "object"}}}]
    reply = api.chat.completions.create(model="poet", response_format=FORMAT, **{**GIVEN, "tools": tools})
    [call] = reply.choices[0].message.tool_calls or []
    assert (call.function.name, call.function.arguments) == ("sing", '{"of": "sun"}')
    assert (reply.choices[0].message.content, reply.choices[0].finish_reason) == (None, "tool_calls")


def test_a_call_that_is_required_is_made_whatever_the_content_would_have_to_be(api: openai.OpenAI) -> None:
    reply = api.chat.completions.create(model="chained", response_format=FORMAT, tool_choice="required", **GIVEN)
    assert reply.choices[0].message.tool_calls and reply.choices[0].message.content is None


@pytest.mark.parametrize(
    ("outputs", "said"),
    [
        ({"grammar": 'start: "a"\n | nothing'}, "structured_outputs: 1(8): unknown name"),
        ({"regex": "a|("}, "structured_outputs: invalid regex"),
        ({"choice": []}, "structured_outputs: has 0 texts"),
    ],
)
def test_a_refusal_shows_nothing_but_what_the_caller_wrote(
    api: openai.OpenAI, outputs: dict[str, Any], said: str
) -> None:
    offers: list[dict[str, Any]] = [{}, {"tools": TOOLS}]
    for tools in offers:
        with pytest.raises(openai.BadRequestError) as caught:
            api.chat.completions.create(
                model="opened", messages=MESSAGES, extra_body={"structured_outputs": outputs}, **tools
            )
        error: Any = caught.value.body
        assert error["message"].startswith(said) and error["param"] == "structured_outputs"
        assert "THOUGHT" not in error["message"]
