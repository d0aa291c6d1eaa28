"""Facts of the model, and texts to token ids and back: the calls as data, what callers give and what they get."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TypeAlias

from motet.calls import UnaryCall
from motet.inputs.conversations import (
    ChatTurn,
    ConversationOptions,
    refuse_conversation_options,
    set_conversation,
)
from motet.inputs.scalars import text_of, uint_of
from motet.v1 import model_pb2, types_pb2

TextInput: TypeAlias = str | Sequence[ChatTurn]

_UINT32_MAX = 2**32 - 1
_SERVICE = "/motet.v1.ModelService/"


class TokenizeOptions(ConversationOptions, total=False):
    """Keyword arguments of tokenize(). Left out or None: the server's default."""

    adapter_digest: str  # one version of the adapter; empty for the active one
    add_special_tokens: bool | None  # those of the checkpoint; default: to a text, not to a conversation
    return_tokens: bool  # return the bytes of each token too


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """The base model, or an adapter on it."""

    name: str  # of the base model
    fingerprint: str  # of its checkpoint, 64 hexadecimal digits
    dtype: str  # of its weights: "float32", "bfloat16" or "float16"
    adapter: str  # "adapters/{id}"; empty for the base model
    adapter_digest: str  # of the adapter's version; empty for the base model
    vocab_size: int  # ids of prompts and completions are below it
    max_model_len: int  # longest context in tokens, prompt and completion together; 0: no worker attached yet
    eos_token_ids: tuple[int, ...]  # tokens that end a completion
    special_tokens: Mapping[int, str]  # tokens that stand for no text, by id
    has_tokenizer: bool  # else only token ids work
    has_chat_template: bool  # else conversations are refused
    sampling: Mapping[str, float]  # what is in effect where a request leaves a parameter unset
    max_tokens: int  # most tokens that are generated where a request says nothing
    recommended_sampling: Mapping[str, float]  # what the checkpoint's or the adapter's generation_config.json says
    labels: tuple[str, ...]  # of the adapter's score head, for classify(); empty without one
    response_template: str = ""  # how completions hold reasoning and tool calls, JSON text; empty if nothing says it


@dataclass(frozen=True, slots=True)
class Tokenized:
    """Token ids of a text or a conversation."""

    token_ids: tuple[int, ...]
    tokens: tuple[bytes, ...]  # with return_tokens: what each adds to a text; may end within a character
    max_model_len: int  # longest context in tokens; 0: no worker attached yet
    adapter: str  # "adapters/{id}"; empty for the base model
    adapter_digest: str  # of the adapter's version; empty for the base model
    model_fingerprint: str
    render_time: datetime | None  # for a conversation: when its chat template was rendered, UTC


def facts_call(adapter: str, adapter_digest: str = "") -> UnaryCall[ModelFacts]:
    """One call. Raises InvalidArgument for what the wire cannot carry."""
    request = model_pb2.GetModelRequest(
        adapter=text_of("adapter", adapter), adapter_digest=text_of("adapter_digest", adapter_digest)
    )
    return UnaryCall(_SERVICE + "GetModel", request, model_pb2.GetModelResponse, _facts_from, is_repeatable=True)


def tokenize_call(prompt: TextInput, adapter: str, options: TokenizeOptions) -> UnaryCall[Tokenized]:
    """One call. Raises InvalidArgument or TypeError for what the wire cannot carry."""
    unknown = set(options) - TokenizeOptions.__annotations__.keys()
    if unknown:
        raise TypeError(f"tokenize() knows no {', '.join(sorted(unknown))}")
    request = model_pb2.TokenizeRequest(
        adapter=text_of("adapter", adapter),
        adapter_digest=text_of("adapter_digest", options.get("adapter_digest", "")),
        return_tokens=bool(options.get("return_tokens")),
    )
    if (adds := options.get("add_special_tokens")) is not None:
        request.add_special_tokens = adds
    if isinstance(prompt, str):
        refuse_conversation_options(options)
        request.text = text_of("prompt", prompt)
    elif isinstance(prompt, Sequence) and not isinstance(prompt, bytes):
        request.chat.SetInParent()
        set_conversation(request.chat, list(prompt), options)  # type: ignore[arg-type]  # not a str, as seen above
    else:
        raise TypeError(f"prompt is {type(prompt).__name__}; give a str or a list of ChatMessage")
    return UnaryCall(_SERVICE + "Tokenize", request, model_pb2.TokenizeResponse, _tokenized_from, is_repeatable=True)


def detokenize_call(
    token_ids: Sequence[int], adapter: str, skip_special_tokens: bool, adapter_digest: str
) -> UnaryCall[str]:
    """One call. Raises InvalidArgument for what the wire cannot carry."""
    request = model_pb2.DetokenizeRequest(
        adapter=text_of("adapter", adapter),
        adapter_digest=text_of("adapter_digest", adapter_digest),
        skip_special_tokens=skip_special_tokens,
    )
    request.token_ids.ids.extend(uint_of("token_ids", token, _UINT32_MAX) for token in token_ids)
    return UnaryCall(
        _SERVICE + "Detokenize",
        request,
        model_pb2.DetokenizeResponse,
        lambda found: str(found.text),
        is_repeatable=True,
    )


def _facts_from(response: model_pb2.GetModelResponse) -> ModelFacts:
    return ModelFacts(
        response.name,
        response.fingerprint,
        response.dtype,
        response.adapter,
        response.adapter_digest,
        response.vocab_size,
        response.max_model_len,
        tuple(response.eos_token_ids),
        {special.id: special.token for special in response.special_tokens},
        response.has_tokenizer,
        response.has_chat_template,
        _numbers(response.sampling),
        response.max_tokens,
        _numbers(response.recommended_sampling),
        tuple(response.labels),
        response.response_template,
    )


def _numbers(sampling: types_pb2.SamplingParams) -> dict[str, float]:
    """What is set, by name."""
    return {field.name: value for field, value in sampling.ListFields() if field.enum_type is None}


def _tokenized_from(response: model_pb2.TokenizeResponse) -> Tokenized:
    return Tokenized(
        tuple(response.token_ids),
        tuple(response.tokens),
        response.max_model_len,
        response.adapter,
        response.adapter_digest,
        response.model_fingerprint,
        response.render_time.ToDatetime(UTC) if response.HasField("render_time") else None,
    )
