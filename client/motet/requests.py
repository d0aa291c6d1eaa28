"""Builds generation requests from what the caller gives, and their continuation after a broken stream.

Refuses only what the protocol cannot carry; the server judges everything else and names the field.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from typing import TypeAlias, TypedDict

from motet.errors import invalid_field
from motet.types import ChatMessage
from motet.v1 import generation_pb2, types_pb2

Message: TypeAlias = ChatMessage | Mapping[str, str]
Prompt: TypeAlias = str | Sequence[int] | Sequence[Message]

_UINT32_MAX = 2**32 - 1
_UINT64_MAX = 2**64 - 1


class GenerateOptions(TypedDict, total=False):
    """Keyword arguments of generate(). Left out or None: the server's default, told back in `started`."""

    adapter: str  # name of the adapter; empty for the base model
    adapter_digest: str  # pins one version of it; empty for the active one
    max_tokens: int | None  # most tokens to generate
    temperature: float | None  # 0 is greedy, the default
    top_k: int | None  # keep the k most likely tokens
    top_p: float | None  # keep the smallest set of tokens whose probability reaches top_p
    seed: int | None  # the same seed gives the same tokens, whatever else is in the batch
    stop: str | Sequence[str]  # end before one of these strings
    stop_token_ids: Sequence[int]  # end after one of these tokens
    ignore_eos: bool | None  # go on after the end-of-sequence token
    cache_salt: str  # requests share cached prompts only when this is equal
    request_id: str  # label of your own for logs, at most 128 printable ASCII characters


def generate_request(prompt: Prompt, options: GenerateOptions) -> generation_pb2.GenerateRequest:
    """One request. Raises InvalidArgument or TypeError for what the wire cannot carry."""
    unknown = set(options) - GenerateOptions.__annotations__.keys()
    if unknown:
        raise TypeError(f"generate() knows no {', '.join(sorted(unknown))}")
    stop = options.get("stop", ())
    stop_token_ids = options.get("stop_token_ids", ())
    ignore_eos = options.get("ignore_eos")
    request = generation_pb2.GenerateRequest(
        request_id=options.get("request_id", ""),
        adapter=options.get("adapter", ""),
        adapter_digest=options.get("adapter_digest", ""),
        cache_salt=options.get("cache_salt", ""),
        sampling=types_pb2.SamplingParams(
            temperature=options.get("temperature"),
            top_k=_optional_uint("sampling.top_k", options.get("top_k"), _UINT32_MAX),
            top_p=options.get("top_p"),
            seed=_optional_uint("sampling.seed", options.get("seed"), _UINT64_MAX),
        ),
        stopping=types_pb2.StoppingParams(
            max_tokens=_optional_uint("stopping.max_tokens", options.get("max_tokens"), _UINT32_MAX),
            stop=[stop] if isinstance(stop, str) else stop,
            stop_token_ids=[_uint("stopping.stop_token_ids", token, _UINT32_MAX) for token in stop_token_ids],
        ),
    )
    if ignore_eos is not None:
        request.stopping.ignore_eos = ignore_eos
    _set_prompt(request, prompt)
    return request


def continuation(
    request: generation_pb2.GenerateRequest,
    started: generation_pb2.GenerationStarted,
    token_ids: Sequence[int],
) -> generation_pb2.GenerateRequest:
    """The request that goes on behind `token_ids` with the same tokens as the unbroken stream.

    What the server chose is pinned: version, seed, and every default that a restarted server could choose anew.
    """
    resumed = generation_pb2.GenerateRequest()
    resumed.CopyFrom(request)
    resumed.request_id = started.request_id
    resumed.adapter_digest = started.adapter_digest
    resumed.sampling.seed = started.sampling.seed
    for field in ("temperature", "top_p"):
        if not request.sampling.HasField(field) and started.sampling.HasField(field):
            setattr(resumed.sampling, field, getattr(started.sampling, field))
    if not request.stopping.HasField("max_tokens") and started.stopping.HasField("max_tokens"):
        resumed.stopping.max_tokens = started.stopping.max_tokens
    resumed.resume_from.ids.extend(token_ids)
    return resumed


def _set_prompt(request: generation_pb2.GenerateRequest, prompt: Prompt) -> None:
    if isinstance(prompt, str):
        request.text = prompt
        return
    if isinstance(prompt, (bytes, Mapping, ChatMessage)) or not isinstance(prompt, Sequence):
        raise TypeError(f"prompt is {type(prompt).__name__}; give a str, a list of token ids or a list of ChatMessage")
    if not prompt:
        raise invalid_field("prompt", "is empty; give at least one token id or message")
    if isinstance(prompt[0], (ChatMessage, Mapping)):
        request.chat.messages.extend(_chat_message(position, item) for position, item in enumerate(prompt))
    else:
        request.token_ids.ids.extend(_uint("prompt", token, _UINT32_MAX) for token in prompt)


def _chat_message(position: int, item: object) -> types_pb2.ChatMessage:
    if isinstance(item, ChatMessage):
        return types_pb2.ChatMessage(role=item.role, content=item.content)
    if not isinstance(item, Mapping) or set(item) != {"role", "content"}:
        raise invalid_field(f"prompt[{position}]", f'is {item!r}; give {{"role": ..., "content": ...}}')
    return types_pb2.ChatMessage(role=item["role"], content=item["content"])


def _optional_uint(field: str, value: int | None, limit: int) -> int | None:
    return None if value is None else _uint(field, value, limit)


def _uint(field: str, value: object, limit: int) -> int:
    """`value` as an integer the wire can carry; the wire would cut off anything else without a word."""
    try:
        number = operator.index(value)  # type: ignore[arg-type]  # this is where a wrong type is found
    except TypeError:
        raise invalid_field(field, f"is {value!r}; give an integer") from None
    if not 0 <= number <= limit:
        raise invalid_field(field, f"is {number}; give an integer from 0 to {limit}")
    return number
