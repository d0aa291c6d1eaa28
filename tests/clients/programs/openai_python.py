"""What a user of the package `openai` does, at the address and with the keys of the environment. Prints what passed.

It runs with any release from 2.0 on, so it imports nothing of Motet.
"""

from __future__ import annotations

import asyncio
import json
import os
import threading
import time
import urllib.request
from collections.abc import Callable
from typing import Any, Literal

import openai
from pydantic import BaseModel

URL = os.environ["MOTET_URL"]
MODEL = "plain"
TURNS: list[Any] = [{"role": "user", "content": "Is it raining?"}]
TOOLS: list[Any] = [{"type": "function", "function": {"name": "look_up", "parameters": {"type": "object"}}}]
GREEDY: dict[str, Any] = {"temperature": 0.0, "max_tokens": 64}
SAID = "It is dry."

api = openai.OpenAI(base_url=f"{URL}/v1", api_key=os.environ["MOTET_KEY"], max_retries=0, timeout=120)


class Weather(BaseModel):
    kind: Literal["sun", "rain"]


def models_are_listed_and_found() -> None:
    names = [model.id for model in api.models.list()]
    assert names == ["chained", MODEL], names
    assert api.models.retrieve(MODEL).id == MODEL


def a_chat_is_whole_and_streamed() -> None:
    for model in ("chained", MODEL):
        reply = api.chat.completions.create(model=model, messages=TURNS, **GREEDY)
        assert (reply.choices[0].message.content, reply.choices[0].finish_reason) == (SAID, "stop"), reply
        with api.chat.completions.create(
            model=model, messages=TURNS, stream=True, stream_options={"include_usage": True}, **GREEDY
        ) as stream:
            *chunks, last = list(stream)
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == SAID
        assert last.choices == [] and last.usage is not None and reply.usage is not None
        assert last.usage.total_tokens == reply.usage.total_tokens


def tools_are_called_and_their_results_sent_back() -> None:
    given: dict[str, Any] = {"model": MODEL, "tools": TOOLS, **GREEDY}
    choice = api.chat.completions.create(messages=TURNS, **given).choices[0]
    assert choice.finish_reason == "tool_calls" and choice.message.tool_calls, choice
    [call] = choice.message.tool_calls
    assert call.type == "function"
    assert (call.function.name, json.loads(call.function.arguments)) == ("look_up", {"city": "Oslo"})
    turns = [*TURNS, choice.message, {"role": "tool", "tool_call_id": call.id, "content": "rain"}]
    assert api.chat.completions.create(messages=turns, **given).choices[0].message.content == "It rains."
    with api.chat.completions.stream(messages=TURNS, **given) as stream:
        kinds = {event.type for event in stream}
        final = stream.get_final_completion().choices[0].message
    assert "tool_calls.function.arguments.done" in kinds, kinds
    assert final.tool_calls and final.tool_calls[0].function.arguments == call.function.arguments


def a_required_tool_is_called() -> None:
    parameters = {"type": "object", "properties": {}, "additionalProperties": False}
    tools: Any = [{"type": "function", "function": {"name": "now", "parameters": parameters}}]
    choice: Any = {"type": "function", "function": {"name": "now"}}
    reply = api.chat.completions.create(
        model=MODEL, messages=TURNS, tools=tools, tool_choice=choice, temperature=1.0, seed=1, max_tokens=200
    )
    calls: Any = reply.choices[0].message.tool_calls
    assert [call.function.name for call in calls] == ["now"] and reply.choices[0].finish_reason == "stop", reply


def a_text_is_parsed_as_a_class() -> None:
    given: dict[str, Any] = {"model": MODEL, "temperature": 1.0, "seed": 2, "logit_bias": spaces()}
    reply = api.chat.completions.parse(messages=TURNS, response_format=Weather, max_tokens=64, **given)
    parsed = reply.choices[0].message.parsed
    assert parsed is not None and parsed.kind in ("sun", "rain"), reply
    response = api.responses.parse(
        model=MODEL, input="Is it raining?", text_format=Weather, max_output_tokens=64, extra_body={"seed": 3}
    )
    assert response.status == "incomplete" or isinstance(response.output_parsed, Weather), response


def spaces() -> dict[str, int]:
    """Space is optional in JSON, and random weights write little else without this bias."""
    body = json.dumps({"prompt": " \n\r\t", "add_special_tokens": False}).encode()
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {os.environ['MOTET_KEY']}"}
    with urllib.request.urlopen(urllib.request.Request(f"{URL}/tokenize", body, headers)) as response:
        return {str(token_id): -100 for token_id in json.load(response)["tokens"]}


def logprobs_come_with_a_chat_and_a_completion() -> None:
    chat = api.chat.completions.create(model=MODEL, messages=TURNS, logprobs=True, top_logprobs=2, **GREEDY)
    content = chat.choices[0].logprobs.content if chat.choices[0].logprobs else None
    assert content and [each.token for each in content[:2]] == ["It is ", "dry."], content
    assert all(each.logprob <= 0 and len(each.top_logprobs) == 2 for each in content)
    text = api.completions.create(model=MODEL, prompt="<|plain|>", logprobs=1, **GREEDY)
    logprobs = text.choices[0].logprobs
    assert logprobs is not None and logprobs.tokens is not None and logprobs.tokens[:2] == ["It is ", "dry."]


def completions_are_of_texts_and_tokens() -> None:
    given: dict[str, Any] = {"model": MODEL, **GREEDY}
    reply = api.completions.create(prompt=["<|plain|>", "<|result|>"], **given)
    assert [choice.text for choice in reply.choices] == [SAID, "It rains."]
    assert [choice.index for choice in api.completions.create(prompt="<|plain|>", n=2, **given).choices] == [0, 1]
    assert api.completions.create(prompt="<|plain|>", stop="dry", **given).choices[0].text == "It is "
    with api.completions.create(prompt="<|plain|>", stream=True, **given) as stream:
        assert "".join(chunk.choices[0].text for chunk in stream) == SAID


def embeddings_are_of_length_one() -> None:
    by_default = api.embeddings.create(model=MODEL, input=["Hello", "Bye"])
    as_floats = api.embeddings.create(model=MODEL, input=["Hello", "Bye"], encoding_format="float")
    for one, same in zip(by_default.data, as_floats.data, strict=True):
        assert max(abs(a - b) for a, b in zip(one.embedding, same.embedding, strict=True)) < 1e-5
        assert abs(sum(value * value for value in one.embedding) - 1) < 1e-3


def responses_are_whole_and_streamed() -> None:
    response = api.responses.create(model=MODEL, input="Is it raining?", max_output_tokens=64, temperature=0)
    assert (response.output_text, response.status) == (SAID, "completed"), response
    with api.responses.stream(model=MODEL, input="Is it raining?", temperature=0) as stream:
        texts = [event.delta for event in stream if event.type == "response.output_text.delta"]
        assert "".join(texts) == stream.get_final_response().output_text == SAID


def refusals_have_the_classes_of_the_package() -> None:
    turn: dict[str, Any] = {"messages": TURNS, "max_tokens": 4}
    missing = raised(openai.NotFoundError, model="no-such-model", **turn)
    assert missing.code == "model_not_found", missing
    assert raised(openai.BadRequestError, model=MODEL, temperature=-1, **turn).param == "temperature"
    assert raised(openai.BadRequestError, model=MODEL, extra_body={"colour": 1}, **turn).param == "colour"
    too_long = raised(
        openai.BadRequestError, model=MODEL, stream=True, messages=[{"role": "user", "content": "a" * 999}]
    )
    assert too_long.code == "context_length_exceeded", too_long
    with openai.OpenAI(base_url=f"{URL}/v1", api_key="wrong", max_retries=0) as stranger:
        assert raised(openai.AuthenticationError, stranger, model=MODEL, **turn).type == "authentication_error"


def a_limit_of_requests_is_a_429_with_a_time() -> None:
    with openai.OpenAI(base_url=f"{URL}/v1", api_key=os.environ["MOTET_LIMITED_KEY"], max_retries=0) as limited:
        short: dict[str, Any] = {"model": "chained", "messages": TURNS, "max_tokens": 4}
        for _ in range(2):  # another program may have used the minute's request
            try:
                limited.chat.completions.create(**short)
            except openai.RateLimitError:
                break
        refused = raised(openai.RateLimitError, limited, **short)
    assert refused.code == "rate_limit_exceeded", refused
    assert 0 < int(refused.response.headers["retry-after-ms"]) <= 60_000, refused.response.headers
    assert 0 < int(refused.response.headers["retry-after"]) <= 60, refused.response.headers


def raised(kind: type[openai.APIStatusError], client: openai.OpenAI = api, **given: Any) -> Any:
    try:
        client.chat.completions.create(**given)
    except kind as error:
        return error
    raise AssertionError(f"{kind.__name__} was not raised")


def a_stream_that_is_left_ends_at_the_server() -> None:
    stream = api.chat.completions.create(
        model=MODEL, messages=TURNS, stream=True, max_tokens=400, extra_body={"ignore_eos": True}
    )
    next(iter(stream))
    stream.close()
    deadline = time.monotonic() + 30
    while num_open_streams() > 0:
        assert time.monotonic() < deadline, "the stream is still open"
        threading.Event().wait(0.02)


def num_open_streams() -> float:
    with urllib.request.urlopen(f"{URL}/metrics") as response:
        lines = response.read().decode().splitlines()
    [value] = [line.split()[-1] for line in lines if line.startswith("motet_gateway_streams_open ")]
    return float(value)


def many_streams_run_at_once() -> None:
    async def run() -> list[str]:
        async with openai.AsyncOpenAI(
            base_url=f"{URL}/v1", api_key=os.environ["MOTET_KEY"], max_retries=0, timeout=120
        ) as client:

            async def one() -> str:
                stream = await client.chat.completions.create(model=MODEL, messages=TURNS, stream=True, **GREEDY)
                return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

            return await asyncio.gather(*(one() for _ in range(24)))

    assert asyncio.run(run()) == [SAID] * 24


PASSES: list[Callable[[], None]] = [
    models_are_listed_and_found,
    a_chat_is_whole_and_streamed,
    tools_are_called_and_their_results_sent_back,
    a_required_tool_is_called,
    a_text_is_parsed_as_a_class,
    logprobs_come_with_a_chat_and_a_completion,
    completions_are_of_texts_and_tokens,
    embeddings_are_of_length_one,
    responses_are_whole_and_streamed,
    refusals_have_the_classes_of_the_package,
    a_limit_of_requests_is_a_429_with_a_time,
    a_stream_that_is_left_ends_at_the_server,
    many_streams_run_at_once,
]

if __name__ == "__main__":
    for step in PASSES:
        step()
        print("passed", step.__name__)
    print("all passed with openai", openai.__version__)
