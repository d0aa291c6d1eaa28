"""What a user of `litellm` does, at the address and with the key of the environment. Prints what passed."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Callable
from importlib.metadata import version
from typing import Any, Literal

import litellm
from pydantic import BaseModel

BASE_URL, KEY = os.environ["MOTET_URL"] + "/v1", os.environ["MOTET_KEY"]
GIVEN: dict[str, Any] = {"api_base": BASE_URL, "api_key": KEY, "max_retries": 0}
TURNS = [{"role": "user", "content": "Is it raining?"}]
TOOLS = [{"type": "function", "function": {"name": "look_up", "parameters": {"type": "object"}}}]
GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 64}
SAID = "It is dry."
# Its names of servers that speak OpenAI's API: the general one, and the one that it has for vLLM.
MODELS = ["openai/plain", "hosted_vllm/plain"]


class Weather(BaseModel):
    kind: Literal["sun", "rain"]


def a_chat_is_whole_and_streamed() -> None:
    for model in MODELS:
        reply: Any = litellm.completion(model=model, messages=TURNS, **GREEDY, **GIVEN)
        assert (reply.choices[0].message.content, reply.choices[0].finish_reason) == (SAID, "stop"), reply
        chunks: list[Any] = list(
            litellm.completion(
                model=model, messages=TURNS, stream=True, stream_options={"include_usage": True}, **GREEDY, **GIVEN
            )
        )
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == SAID
        [usage] = [chunk.usage for chunk in chunks if getattr(chunk, "usage", None)]
        assert usage.total_tokens == reply.usage.total_tokens


def coroutines_give_the_same() -> None:
    async def run() -> str:
        stream: Any = await litellm.acompletion(model=MODELS[0], messages=TURNS, stream=True, **GREEDY, **GIVEN)
        return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

    assert asyncio.run(run()) == SAID


def tools_are_called_and_their_results_sent_back() -> None:
    for model in MODELS:
        given: dict[str, Any] = {"model": model, "tools": TOOLS, **GREEDY, **GIVEN}
        reply: Any = litellm.completion(messages=TURNS, **given)
        message = reply.choices[0].message
        [call] = message.tool_calls
        assert reply.choices[0].finish_reason == "tool_calls" and message.reasoning_content == "Hm, weather.", reply
        assert (call.function.name, json.loads(call.function.arguments)) == ("look_up", {"city": "Oslo"})
        chunks = list(litellm.completion(messages=TURNS, stream=True, **given))
        whole: Any = litellm.stream_chunk_builder(chunks, messages=TURNS)
        assert whole.choices[0].message.tool_calls[0].function.arguments == call.function.arguments
        turns = [*TURNS, message, {"role": "tool", "tool_call_id": call.id, "content": "rain"}]
        again: Any = litellm.completion(messages=turns, **given)
        assert again.choices[0].message.content == "It rains."


def a_schema_holds() -> None:
    for model in MODELS:
        reply: Any = litellm.completion(
            model=model,
            messages=TURNS,
            response_format=Weather,
            temperature=1,
            seed=2,
            max_tokens=64,
            logit_bias={"32": -100, "10": -100, "13": -100, "9": -100},  # space, which is optional in JSON
            **GIVEN,
        )
        Weather.model_validate_json(reply.choices[0].message.content)


def logprobs_completions_and_embeddings_are_served() -> None:
    reply: Any = litellm.completion(model=MODELS[0], messages=TURNS, logprobs=True, top_logprobs=2, **GREEDY, **GIVEN)
    assert [each.token for each in reply.choices[0].logprobs.content[:2]] == ["It is ", "dry."]
    text: Any = litellm.text_completion(model="text-completion-openai/plain", prompt="<|plain|>", **GREEDY, **GIVEN)
    assert text.choices[0].text == SAID
    for model in MODELS:
        assert len(litellm.embedding(model=model, input=["Hello", "Bye"], **GIVEN).data) == 2


def responses_give_the_same_text() -> None:
    reply: Any = litellm.responses(model=MODELS[0], input="Is it raining?", temperature=0, **GIVEN)
    assert reply.output_text == SAID, reply


def refusals_have_its_classes() -> None:
    refusals: list[tuple[dict[str, str | int], type[Exception]]] = [
        ({"model": "openai/no-such-model"}, litellm.NotFoundError),
        ({"model": "openai/plain", "temperature": -1}, litellm.BadRequestError),
        ({"model": "openai/plain", "api_key": "wrong"}, litellm.AuthenticationError),
    ]
    for given, kind in refusals:
        try:
            litellm.completion(**{"messages": TURNS, **GIVEN, **given})
        except kind:
            continue
        raise AssertionError(f"{kind.__name__} was not raised for {given['model']}")


PASSES: list[Callable[[], None]] = [
    a_chat_is_whole_and_streamed,
    coroutines_give_the_same,
    tools_are_called_and_their_results_sent_back,
    a_schema_holds,
    logprobs_completions_and_embeddings_are_served,
    responses_give_the_same_text,
    refusals_have_its_classes,
]

if __name__ == "__main__":
    for step in PASSES:
        step()
        print("passed", step.__name__)
    print("all passed with litellm", version("litellm"))
