"""The requests that are sent to Motet and to vLLM. Both serve the checkpoint `chained` with the adapter `plain`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

_TURNS = [{"role": "user", "content": "Is it raining?"}]
_TOOL = {"type": "function", "function": {"name": "look_up", "parameters": {"type": "object"}}}
_NOW_PARAMETERS = {"type": "object", "properties": {}, "additionalProperties": False}
_NOW = {"type": "function", "function": {"name": "now", "parameters": _NOW_PARAMETERS}}
_SCHEMA = {
    "type": "object",
    "properties": {"kind": {"enum": ["sun", "rain"]}},
    "required": ["kind"],
    "additionalProperties": False,
}
_FORMAT = {"type": "json_schema", "json_schema": {"name": "weather", "schema": _SCHEMA}}
_NO_SPACE = {"32": -100, "10": -100, "13": -100, "9": -100}  # optional in JSON, and likely with random weights
_CHAT: dict[str, Any] = {"model": "plain", "messages": _TURNS, "temperature": 0, "max_tokens": 64}
_TEXT: dict[str, Any] = {"model": "plain", "prompt": "<|plain|>", "temperature": 0, "max_tokens": 16}
_RESPONSE: dict[str, Any] = {
    "model": "plain",
    "input": "Is it raining?",
    "temperature": 0,
    "max_output_tokens": 64,
    "store": False,
}
_STREAM = {"stream": True}
_USAGE = {"stream": True, "stream_options": {"include_usage": True}}


@dataclass(frozen=True)
class Case:
    """One request. Without a body it is a GET; a body of text is sent as it is."""

    path: str
    body: Mapping[str, Any] | str | None = None


def _chat(**fields: Any) -> Case:
    return Case("/v1/chat/completions", {**_CHAT, **fields})


def _text(**fields: Any) -> Case:
    return Case("/v1/completions", {**_TEXT, **fields})


def _response(**fields: Any) -> Case:
    return Case("/v1/responses", {**_RESPONSE, **fields})


CASES: Mapping[str, Case] = {
    "models": Case("/v1/models"),
    "version": Case("/version"),
    "health": Case("/health"),
    "tokenize": Case("/tokenize", {"model": "plain", "prompt": "Hello"}),
    "tokenize: a chat": Case("/tokenize", {"model": "plain", "messages": _TURNS, "return_token_strs": True}),
    "detokenize": Case("/detokenize", {"model": "plain", "tokens": [72, 101]}),
    "chat": _chat(),
    "chat: base model": _chat(model="chained"),
    "chat: two choices": _chat(n=2, temperature=1, seed=1),
    "chat: cut": _chat(max_tokens=1),
    "chat: max_completion_tokens": _chat(max_tokens=None, max_completion_tokens=1),
    "chat: stop string": _chat(stop="dry"),
    "chat: stop token": _chat(stop_token_ids=[46]),
    "chat: log-probabilities": _chat(logprobs=True, top_logprobs=2),
    "chat: schema": _chat(response_format=_FORMAT, logit_bias=_NO_SPACE),
    "chat: JSON object": _chat(response_format={"type": "json_object"}, logit_bias=_NO_SPACE, max_tokens=4),
    "chat: choice": _chat(structured_outputs={"choice": ["yes", "no"]}),
    "chat: tools": _chat(tools=[_TOOL]),
    "chat: tools, not chosen": _chat(tools=[_TOOL], tool_choice="none"),
    "chat: tool required": _chat(tools=[_NOW], tool_choice="required", logit_bias=_NO_SPACE),
    "chat: tool by name": _chat(
        tools=[_NOW], tool_choice={"type": "function", "function": {"name": "now"}}, logit_bias=_NO_SPACE
    ),
    "chat stream": _chat(**_STREAM),
    "chat stream: usage": _chat(**_USAGE),
    "chat stream: log-probabilities": _chat(logprobs=True, top_logprobs=2, **_STREAM),
    "chat stream: tools": _chat(tools=[_TOOL], **_STREAM),
    "chat stream: cut": _chat(max_tokens=1, **_STREAM),
    "completion": _text(),
    "completion: texts": _text(prompt=["<|plain|>", "<|result|>"]),
    "completion: tokens": _text(prompt=[72, 101]),
    "completion: log-probabilities": _text(logprobs=2),
    "completion: echo": _text(echo=True),
    "completion stream": _text(**_STREAM),
    "completion stream: usage": _text(**_USAGE),
    "completion stream: log-probabilities": _text(logprobs=2, **_STREAM),
    "response": _response(),
    "response: tools": _response(tools=[{"type": "function", "name": "look_up", "parameters": {"type": "object"}}]),
    "response stream": _response(**_STREAM),
    "refused: model": _chat(model="no-such-model"),
    "refused: model of a stream": _chat(model="no-such-model", **_STREAM),
    "refused: model of a completion": _text(model="no-such-model"),
    "refused: model of a response": _response(model="no-such-model"),
    "refused: no messages": Case("/v1/chat/completions", {"model": "plain"}),
    "refused: no JSON": Case("/v1/chat/completions", "{"),
    "refused: temperature": _chat(temperature=-1),
    "refused: temperature as text": _chat(temperature="warm"),
    "refused: top_p": _chat(top_p=2),
    "refused: no choices": _chat(n=0),
    "refused: max_tokens": _chat(max_tokens=-1),
    "refused: no tokens": _chat(max_tokens=0),
    "refused: top_logprobs": _chat(logprobs=True, top_logprobs=500),
    "refused: prompt too long": _text(prompt=[72] * 600),
    "refused: limit too long": _text(max_tokens=600),
    "refused: stream of a prompt too long": _text(prompt=[72] * 600, **_STREAM),
    "refused: token outside the vocabulary": _text(prompt=[999_999]),
    "refused: empty prompt": _text(prompt=[]),
    "refused: tool choice without tools": _chat(tool_choice="required"),
    "refused: unknown tool": _chat(tools=[_TOOL], tool_choice={"type": "function", "function": {"name": "other"}}),
    "refused: schema": _chat(response_format={"type": "json_schema", "json_schema": {"name": "a", "schema": 5}}),
    "refused: regular expression": _chat(structured_outputs={"regex": "(a"}),
    "refused: unknown field": _chat(colour="red"),
    "refused: route": Case("/v1/nothing"),
    "refused: method": Case("/v1/chat/completions"),
    "refused: adapter that is not there": Case("/v1/load_lora_adapter", {"lora_name": "x", "lora_path": "/no/such"}),
    "refused: unloading what is not loaded": Case("/v1/unload_lora_adapter", {"lora_name": "no-such-model"}),
}
