"""What a user of `langchain-openai` does, at the address and with the key of the environment. Prints what passed."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from importlib.metadata import version
from typing import Any, Literal

import openai
from langchain_core.messages import HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI, OpenAI, OpenAIEmbeddings
from pydantic import BaseModel

BASE_URL, KEY = os.environ["MOTET_URL"] + "/v1", os.environ["MOTET_KEY"]
GIVEN: dict[str, Any] = {"base_url": BASE_URL, "api_key": KEY, "max_retries": 0}
QUESTION, SAID = "Is it raining?", "It is dry."


class Weather(BaseModel):
    """The weather."""

    kind: Literal["sun", "rain"]


def _look_up(city: str) -> str:
    """The weather of a city."""
    return f"rain in {city}"


look_up = tool("look_up")(_look_up)


def chat(**given: Any) -> ChatOpenAI:
    return ChatOpenAI(model="plain", **{"temperature": 0, "max_tokens": 64, **GIVEN, **given})


def a_chat_is_whole_and_streamed() -> None:
    reply = chat().invoke(QUESTION)
    assert reply.content == SAID and reply.usage_metadata, reply
    chunks = list(chat(stream_usage=True).stream(QUESTION))
    assert "".join(str(chunk.content) for chunk in chunks) == SAID
    [usage] = [chunk.usage_metadata for chunk in chunks if chunk.usage_metadata]
    assert usage["total_tokens"] == reply.usage_metadata["total_tokens"]


def a_batch_and_coroutines_give_the_same() -> None:
    assert [reply.content for reply in chat().batch([QUESTION] * 4)] == [SAID] * 4
    assert asyncio.run(chat().ainvoke(QUESTION)).content == SAID


def tools_are_called_and_their_results_sent_back() -> None:
    model = chat().bind_tools([look_up])
    reply = model.invoke(QUESTION)
    [call] = reply.tool_calls
    assert (call["name"], call["args"]) == ("look_up", {"city": "Oslo"})
    result = look_up.invoke(call)
    assert isinstance(result, ToolMessage) and result.content == "rain in Oslo"
    assert model.invoke([HumanMessage(QUESTION), reply, result]).content == "It rains."
    whole: Any = None
    for chunk in model.stream(QUESTION):
        whole = chunk if whole is None else whole + chunk
    assert [(each["name"], each["args"]) for each in whole.tool_calls] == [("look_up", {"city": "Oslo"})]


def a_text_is_parsed_as_a_class() -> None:
    bias = {"32": -100, "10": -100, "13": -100, "9": -100}  # of the test's tokenizer: space, which is optional in JSON
    for method in ("json_schema", "function_calling"):
        model = chat(temperature=1, seed=2, logit_bias=bias, max_tokens=200).with_structured_output(
            Weather, method=method
        )
        parsed = model.invoke(QUESTION)
        assert isinstance(parsed, Weather), (method, parsed)


def logprobs_are_in_the_metadata() -> None:
    reply = chat(logprobs=True, top_logprobs=2).invoke(QUESTION)
    assert [each["token"] for each in reply.response_metadata["logprobs"]["content"][:2]] == ["It is ", "dry."]


def responses_give_the_same_text() -> None:
    reply = chat(use_responses_api=True).invoke(QUESTION)
    assert reply.text == SAID, reply
    assert "".join(chunk.text for chunk in chat(use_responses_api=True).stream(QUESTION)) == SAID


def completions_and_embeddings_are_served() -> None:
    assert OpenAI(model="plain", temperature=0, **GIVEN).invoke("<|plain|>") == SAID
    vectors = OpenAIEmbeddings(model="plain", check_embedding_ctx_length=False, **GIVEN).embed_documents(
        ["Hello", "Bye"]
    )
    assert len(vectors) == 2 and vectors[0] != vectors[1]


def refusals_have_the_classes_of_openai() -> None:
    try:
        ChatOpenAI(model="no-such-model", **GIVEN).invoke(QUESTION)
    except openai.NotFoundError as error:
        assert error.code == "model_not_found"
    else:
        raise AssertionError("an unknown model was not refused")


PASSES: list[Callable[[], None]] = [
    a_chat_is_whole_and_streamed,
    a_batch_and_coroutines_give_the_same,
    tools_are_called_and_their_results_sent_back,
    a_text_is_parsed_as_a_class,
    logprobs_are_in_the_metadata,
    responses_give_the_same_text,
    completions_and_embeddings_are_served,
    refusals_have_the_classes_of_openai,
]

if __name__ == "__main__":
    for step in PASSES:
        step()
        print("passed", step.__name__)
    print("all passed with langchain-openai", version("langchain-openai"))
