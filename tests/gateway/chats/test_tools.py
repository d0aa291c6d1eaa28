"""Tool calls and reasoning as the `openai` package reads them, of a model that writes them, over several turns."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest
from motet import Client
from motet.responses import find_form

from tests.gateway.chats.chained_system import GIVEN, MESSAGES, TOOLS


@pytest.fixture
def api(system: tuple[Client, openai.OpenAI]) -> openai.OpenAI:
    return system[1]


def calls(message: Any) -> list[tuple[str, Any]]:
    return [(call.function.name, json.loads(call.function.arguments)) for call in message.tool_calls or ()]


NEAR_TOKENS = 2  # how far an estimate for tokens that came in one chunk may be off
BOTH = [("look_up", {"city": "Oslo"}), ("now", {})]


@pytest.mark.parametrize("model", ["chained", "plain"])
def test_a_message_has_reasoning_content_and_calls(api: openai.OpenAI, model: str) -> None:
    choice = api.chat.completions.create(model=model, **GIVEN).choices[0]
    message = choice.message
    assert (message.content, (message.model_extra or {})["reasoning_content"]) == ("I look.", "Hm, weather.")
    assert calls(message) == BOTH and choice.finish_reason == "tool_calls"
    assert len({call.id for call in message.tool_calls or ()}) == 2


def test_a_stream_has_the_name_first_then_arguments_as_they_are_generated(api: openai.OpenAI) -> None:
    with api.chat.completions.create(model="plain", stream=True, **GIVEN) as stream:
        choices = [chunk.choices[0] for chunk in stream]
    deltas = [choice.delta for choice in choices]
    assert "".join((delta.model_extra or {}).get("reasoning_content", "") for delta in deltas) == "Hm, weather."
    assert "".join(delta.content or "" for delta in deltas) == "I look."
    pieces = [call for delta in deltas for call in delta.tool_calls or ()]
    by_index = [[piece for piece in pieces if piece.index == index] for index in (0, 1)]
    assert len(by_index[0]) + len(by_index[1]) == len(pieces)
    for (first, *later), (name, arguments) in zip(by_index, BOTH, strict=True):
        assert first.function is not None and (first.function.name, first.function.arguments) == (name, "")
        assert first.id and first.type == "function"
        assert all(piece.id is None and piece.type is None and piece.function for piece in later)
        assert json.loads("".join(piece.function.arguments or "" for piece in later if piece.function)) == arguments
    assert [piece.function.arguments for piece in by_index[0][1:] if piece.function] == ['{"city": ', '"Os', 'lo"}']
    assert [choice.finish_reason for choice in choices if choice.finish_reason] == ["tool_calls"]


def test_a_result_that_is_sent_back_gives_the_next_turn(api: openai.OpenAI) -> None:
    first = api.chat.completions.create(model="plain", **GIVEN).choices[0].message
    results = [{"role": "tool", "tool_call_id": call.id, "content": "rain"} for call in first.tool_calls or ()]
    turns = [*MESSAGES, first.model_dump(exclude_none=True, exclude={"refusal"}), *results]
    choice = api.chat.completions.create(model="plain", **{**GIVEN, "messages": turns}).choices[0]
    assert (choice.message.content, choice.message.tool_calls, choice.finish_reason) == ("It rains.", None, "stop")


def test_an_adapter_with_a_chat_template_of_its_own_is_read_by_its_own_marks(api: openai.OpenAI) -> None:
    choice = api.chat.completions.create(model="poet", **GIVEN).choices[0]
    assert calls(choice.message) == [("sing", {"of": "sun"})] and choice.message.content is None


def test_a_template_that_cannot_be_used_leaves_the_adapters_chat_as_text(api: openai.OpenAI) -> None:
    choice = api.chat.completions.create(model="broken", **GIVEN).choices[0]
    assert (choice.message.content or "").startswith("Hm, weather.") and choice.message.tool_calls is None
    assert choice.finish_reason == "stop"


@pytest.mark.parametrize("options", [{"tool_choice": "none"}, {"tools": openai.NOT_GIVEN}])
def test_without_tools_to_choose_reasoning_alone_is_read(api: openai.OpenAI, options: dict[str, Any]) -> None:
    choice = api.chat.completions.create(model="plain", **{**GIVEN, **options}).choices[0]
    assert choice.message.tool_calls is None and choice.finish_reason == "stop"
    assert (choice.message.content or "").startswith('I look.<tool_call>{"name"')
    assert (choice.message.model_extra or {})["reasoning_content"] == "Hm, weather."


@pytest.mark.parametrize("stream", [False, True])
def test_one_call_alone_where_parallel_calls_are_not_wanted(api: openai.OpenAI, stream: bool) -> None:
    given = {**GIVEN, "model": "plain", "parallel_tool_calls": False}
    if not stream:
        assert calls(api.chat.completions.create(**given).choices[0].message) == BOTH[:1]
        return
    with api.chat.completions.create(**given, stream=True) as chunks:
        deltas = [call for chunk in chunks for call in chunk.choices[0].delta.tool_calls or ()]
    assert {call.index for call in deltas} == {0}


def test_a_call_that_the_limit_cuts_keeps_the_arguments_that_came(api: openai.OpenAI) -> None:
    choice = api.chat.completions.create(model="plain", **{**GIVEN, "max_tokens": 11}).choices[0]
    [call] = choice.message.tool_calls or []
    assert choice.finish_reason == "length" and call.type == "function"
    assert (call.function.name, call.function.arguments) == ("look_up", '{"city": "Os')


def test_a_stop_string_ends_the_content(api: openai.OpenAI) -> None:
    choice = api.chat.completions.create(model="plain", stop="look", **GIVEN).choices[0]
    assert (choice.message.content, choice.message.tool_calls, choice.finish_reason) == ("I", None, "stop")


def test_all_completions_and_all_logprobs_come_whole_and_streamed(api: openai.OpenAI) -> None:
    given: dict[str, Any] = {**GIVEN, "model": "plain", "n": 2, "logprobs": True, "temperature": 0.5, "seed": 1}
    whole = api.chat.completions.create(**given)
    assert whole.usage is not None
    tokens: list[list[str]] = [[], []]
    with api.chat.completions.create(**given, stream=True) as stream:
        for chunk in stream:
            choice = chunk.choices[0]
            tokens[choice.index] += [each.token for each in (choice.logprobs and choice.logprobs.content) or ()]
    for choice, streamed in zip(whole.choices, tokens, strict=True):
        assert calls(choice.message) == BOTH and choice.logprobs is not None
        assert [each.token for each in choice.logprobs.content or ()] == streamed
    assert sum(map(len, tokens)) == whole.usage.completion_tokens


def test_the_usage_counts_the_tokens_of_reasoning(api: openai.OpenAI) -> None:
    """About the same for a chat, its stream, two completions of it, and a response: tokens may come together."""
    whole = api.chat.completions.create(model="plain", **GIVEN).usage
    assert whole is not None and whole.completion_tokens_details is not None
    num_tokens = whole.completion_tokens_details.reasoning_tokens
    assert num_tokens is not None and 0 < num_tokens < whole.completion_tokens
    with api.chat.completions.create(
        model="plain", stream=True, stream_options={"include_usage": True}, **GIVEN
    ) as stream:
        *_, last = stream
    assert last.usage is not None and last.usage.completion_tokens_details is not None
    both = api.chat.completions.create(model="plain", n=2, **GIVEN).usage
    assert both is not None and both.completion_tokens_details is not None
    content: Any = MESSAGES[-1]["content"]
    response = api.responses.create(model="plain", input=content, temperature=0, max_output_tokens=64)
    assert response.usage is not None
    assert last.usage.completion_tokens_details.reasoning_tokens == pytest.approx(num_tokens, abs=NEAR_TOKENS)
    assert both.completion_tokens_details.reasoning_tokens == pytest.approx(2 * num_tokens, abs=2 * NEAR_TOKENS)
    assert response.usage.output_tokens_details.reasoning_tokens == pytest.approx(num_tokens, abs=NEAR_TOKENS)
    assert response.usage.input_tokens_details.to_dict().keys() == {"cached_tokens"}


def test_a_chat_that_is_not_read_has_no_count_of_reasoning(api: openai.OpenAI) -> None:
    usage = api.chat.completions.create(model="broken", **GIVEN).usage
    assert usage is not None and usage.completion_tokens_details is None


def test_a_required_call_comes_behind_the_reasoning(api: openai.OpenAI) -> None:
    named: Any = {"type": "function", "function": {"name": "look_up"}}
    choice = api.chat.completions.create(model="plain", tool_choice=named, **GIVEN).choices[0]
    assert (choice.message.model_extra or {})["reasoning_content"] == "Hm, weather."
    assert calls(choice.message) == BOTH[:1] and (choice.message.content, choice.finish_reason) == (None, "stop")


def test_a_message_that_goes_on_is_read_from_where_it_ended(api: openai.OpenAI) -> None:
    turns = [*MESSAGES, {"role": "assistant", "content": "<think>Hm, "}]
    extra = {"continue_final_message": True, "add_generation_prompt": False}
    choice = api.chat.completions.create(model="plain", extra_body=extra, **{**GIVEN, "messages": turns}).choices[0]
    assert (choice.message.model_extra or {})["reasoning_content"] == "weather." and calls(choice.message) == BOTH


def test_users_of_grpc_read_the_same(system: tuple[Client, openai.OpenAI]) -> None:
    client = system[0]
    form = find_form(client, "plain")
    assert form is not None and form.generation_prompt == "<|begin|>"
    text = client.generate(
        MESSAGES, adapter="plain", tools=TOOLS, temperature=0.0, max_tokens=64, skip_special_tokens=False
    )
    parser = form.parser()
    events = [event for chunk in text for event in parser.push(chunk.text)] + parser.finish()
    names = [event.name for event in events if hasattr(event, "name")]
    assert names == ["look_up", "now"]
