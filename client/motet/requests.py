"""Builds generation requests from what the caller gives, and their continuation after a broken stream.

Refuses only what the protocol cannot carry; the server judges everything else and names the field.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

from motet.adapters.uses import AdapterUses, Combination, combination_to, uses_to
from motet.connection.trace import trace_metadata
from motet.errors import invalid_field
from motet.inputs.constraints import Constraint, constraint_to
from motet.inputs.conversations import (
    ChatMessage,
    ChatTurn,
    ConversationOptions,
    refuse_conversation_options,
    set_conversation,
)
from motet.inputs.lora_task import LoraTask, task_id_of
from motet.inputs.scalars import integer_of, list_of, number_of, text_of, truth_of, uint_of
from motet.types import BeamSearch
from motet.v1 import generation_pb2, types_pb2
from motet.v1.sampling import SamplingOptions

Prompt: TypeAlias = str | Sequence[int] | Sequence[ChatTurn]

TENANT_KEY = "motet-tenant"  # metadata
_UINT32_MAX = 2**32 - 1
_UINT64_MAX = 2**64 - 1
_INT32_MAX = 2**31 - 1
_MAX_DURATION_S = 3e9  # that a Duration and its nanoseconds hold
_UINT_MAX = {FieldDescriptor.TYPE_UINT32: _UINT32_MAX, FieldDescriptor.TYPE_UINT64: _UINT64_MAX}


class GenerateOptions(SamplingOptions, ConversationOptions, total=False):
    """Keyword arguments of generate(), sampling parameters among them. Left out or None: the server's default.

    The values in effect are reported in `started`.
    """

    adapter: str | None  # name of the adapter, also "name@number" or "name@label"; empty for the base model
    adapter_digest: str  # pins one version of it; empty for the active one, or the canary
    adapters: AdapterUses  # instead of adapter: up to 4 that act together, {"a": 0.7, "b": 0.3}; or one with a scale
    combination: Combination | None  # how adapters are combined, as PEFT does: "cat" (default) or "linear"
    lora_task: LoraTask | int | None  # instead of adapter: weights sent under a number, or the number of such weights
    routing_key: str  # requests with equal keys get the same one of active version and canary; at most 128 bytes
    max_tokens: int | None  # the largest number of tokens to generate
    n: int | None  # completions to return, each with its own index
    best_of: int | None  # completions to sample; the n most likely ones are returned at the end
    beam_search: BeamSearch | None  # instead of sampling; the n best completions are returned at the end
    constraint: Constraint | None  # what the text must be: JsonSchema, JsonObject, Regex, Choices, Lark, StructuralTags
    stop: str | Sequence[str]  # end before one of these strings
    stop_token_ids: Sequence[int]  # end after one of these tokens
    min_tokens: int | None  # tokens before which no stop string, stop token or end-of-sequence ends a completion
    ignore_eos: bool | None  # go on after the end-of-sequence token
    token_bytes: bool  # with log-probabilities: the bytes of every token that has one
    include_stop: bool  # deliver the stop string that ended a completion, or the text of the stop token
    skip_special_tokens: bool | None  # leave special tokens out of the text; default true
    delta_tokens: int | None  # tokens of a completion that one chunk gathers, 1 to 128; default 1
    delta_wait_s: float | None  # longest time that a token waits for others of its chunk, 0.001 to 10 s; default 1 s
    model_fingerprint: str  # the model that you rely on, as in status(); a server with another one refuses
    cache_salt: str  # requests of one tenant share cached prompts only if this is equal
    request_id: str  # label of your own for logs, at most 128 printable ASCII characters
    priority: int | None  # among the requests of your tenant, higher ones run first; from -100 to 100
    tenant: str  # who the request is counted for; empty: the client's


def generate_request(prompt: Prompt, options: GenerateOptions) -> generation_pb2.GenerateRequest:
    """One request. Raises InvalidArgument or TypeError for what the wire cannot carry."""
    unknown = set(options) - GenerateOptions.__annotations__.keys()
    if unknown:
        raise TypeError(f"generate() knows no {', '.join(sorted(unknown))}")
    stop = options.get("stop")
    ignore_eos = options.get("ignore_eos")
    request = generation_pb2.GenerateRequest(
        request_id=text_of("request_id", options.get("request_id", "")),
        adapter=text_of("adapter", options.get("adapter") or ""),
        adapter_digest=text_of("adapter_digest", options.get("adapter_digest", "")),
        adapters=uses_to(options.get("adapters", ())),
        combination=combination_to(options.get("combination")),
        lora_task_id=task_id_of(options.get("lora_task")),
        routing_key=text_of("routing_key", options.get("routing_key", "")),
        cache_salt=text_of("cache_salt", options.get("cache_salt", "")),
        sampling=_sampling(options),
        stopping=types_pb2.StoppingParams(
            max_tokens=_optional_uint("stopping.max_tokens", options.get("max_tokens"), _UINT32_MAX, lowest=1),
            stop=[
                text_of("stopping.stop", text)
                for text in ([stop] if isinstance(stop, str) else list_of("stopping.stop", stop))
            ],
            stop_token_ids=[
                uint_of("stopping.stop_token_ids", token, _UINT32_MAX)
                for token in list_of("stopping.stop_token_ids", options.get("stop_token_ids"))
            ],
            min_tokens=_optional_uint("stopping.min_tokens", options.get("min_tokens"), _UINT32_MAX),
        ),
        priority=_priority(options.get("priority")),
        constraint=constraint_to(options.get("constraint")),
    )
    _set_decoding(request, options)
    if ignore_eos is not None:
        request.stopping.ignore_eos = truth_of("stopping.ignore_eos", ignore_eos)
    if options.get("model_fingerprint"):
        request.preconditions.model_fingerprint = text_of("model_fingerprint", options["model_fingerprint"])
    _set_output(request.output, options)
    _set_prompt(request, prompt, options)
    return request


def task_of(options: GenerateOptions) -> LoraTask | None:
    """The weights that the request may bring."""
    task = options.get("lora_task")
    return task if isinstance(task, LoraTask) else None


def metadata_of(options: GenerateOptions, default_tenant: str) -> tuple[tuple[str, str], ...]:
    """The metadata of the request."""
    return call_metadata(options.get("tenant") or default_tenant)


def call_metadata(tenant: str) -> tuple[tuple[str, str], ...]:
    """The metadata of a call: its tenant, unless the name is empty, and its trace, if there is one."""
    trace = trace_metadata()
    return ((TENANT_KEY, tenant), *trace) if tenant else trace


def is_resumable(request: generation_pb2.GenerateRequest) -> bool:
    """Whether a broken stream can be continued after its tokens: a single sample, no beam search."""
    decoding = request.decoding
    return decoding.n <= 1 and decoding.best_of <= 1 and not decoding.HasField("beam_search")


def continuation(
    request: generation_pb2.GenerateRequest,
    started: generation_pb2.GenerationStarted,
    token_ids: Sequence[int],
) -> generation_pb2.GenerateRequest:
    """The request that continues a stream after `token_ids`, with the tokens that the unbroken stream would have."""
    resumed = repetition(request, started)
    resumed.resume_from.ids.extend(token_ids)
    return resumed


def repetition(
    request: generation_pb2.GenerateRequest, started: generation_pb2.GenerationStarted
) -> generation_pb2.GenerateRequest:
    """The request that gives the tokens of the broken stream once more, from the first one on.

    What the server chose is pinned: version, seed, every default that a restarted server could choose differently, and
    the date that a chat template prints. A server with another model, or that makes another prompt of the input,
    refuses it.
    """
    resumed = generation_pb2.GenerateRequest()
    resumed.CopyFrom(request)
    resumed.request_id = started.request_id
    resumed.adapter = request.adapter.partition("@")[0]  # a label may point to another version meanwhile
    resumed.adapter_digest = started.adapter_digest
    if request.adapters:
        resumed.ClearField("adapters")
        resumed.adapters.extend(started.adapters)
        resumed.adapter_digest = ""
    _pin_unset(resumed.sampling, started.sampling)
    _pin_unset(resumed.stopping, started.stopping)
    resumed.sampling.ClearField("prompt_logprobs")  # returned already
    if request.HasField("chat") and started.HasField("render_time"):
        resumed.chat.render_time.CopyFrom(started.render_time)
    resumed.preconditions.model_fingerprint = started.model_fingerprint
    resumed.preconditions.prompt_sha256 = started.prompt_sha256
    return resumed


def what_changed(
    first: generation_pb2.GenerationStarted, later: generation_pb2.GenerationStarted
) -> tuple[str, object, object] | None:
    """The first setting in which a continuation differs from its beginning: its name, later value and first value.

    None if both can be one stream.
    """
    for field in ("adapter_digest", "adapters", "model_fingerprint", "prompt_sha256", "prompt_tokens"):
        if getattr(later, field) != getattr(first, field):
            return field, getattr(later, field), getattr(first, field)
    for part in ("sampling", "stopping", "decoding"):
        settings, before = getattr(later, part), getattr(first, part)
        for descriptor in before.DESCRIPTOR.fields:
            name = descriptor.name
            # Prompt log-probabilities came at the start: a continuation does not request them.
            if name != "prompt_logprobs" and getattr(settings, name) != getattr(before, name):
                return f"{part}.{name}", getattr(settings, name), getattr(before, name)
    return None


def _pin_unset(settings: Message, effective: Message) -> None:
    """Give every optional field of `settings` that is unset the value in effect."""
    for field in settings.DESCRIPTOR.fields:
        if not field.has_presence or field.message_type is not None or settings.HasField(field.name):
            continue
        if effective.HasField(field.name):
            setattr(settings, field.name, getattr(effective, field.name))


def _sampling(options: GenerateOptions) -> types_pb2.SamplingParams:
    given: dict[str, Any] = {}
    for field in types_pb2.SamplingParams.DESCRIPTOR.fields:
        value: Any = options.get(field.name)
        path = f"sampling.{field.name}"
        if value is None:
            continue
        if field.name == "logit_bias":
            if not isinstance(value, Mapping):
                raise invalid_field(path, f"is {value!r:.100}; give {{token id: bias}}")
            value = {uint_of(path, token, _UINT32_MAX): number_of(path, bias) for token, bias in value.items()}
        elif field.type in _UINT_MAX:
            value = uint_of(path, value, _UINT_MAX[field.type])
        elif field.enum_type is not None:
            value = _enum_number(path, value, field.enum_type)
        else:
            value = number_of(path, value)
        given[field.name] = value
    return types_pb2.SamplingParams(**given)


def enum_choices(enum: Any) -> dict[str, int]:
    """The values of an enum (its descriptor) by the names that callers use: "raw" for LOGPROBS_MODE_RAW."""
    prefix = enum.values_by_number[0].name.removesuffix("UNSPECIFIED")
    return {value.name.removeprefix(prefix).lower(): value.number for value in enum.values if value.number}


def _enum_number(path: str, name: object, enum: Any) -> int:
    choices = enum_choices(enum)
    if not isinstance(name, str) or name not in choices:
        raise invalid_field(path, f"is {name!r}; give one of {', '.join(choices)}")
    return choices[name]


def _set_decoding(request: generation_pb2.GenerateRequest, options: GenerateOptions) -> None:
    decoding = request.decoding
    for name, value in (("n", options.get("n")), ("best_of", options.get("best_of"))):
        if value is not None:
            setattr(decoding, name, uint_of(f"decoding.{name}", value, _UINT32_MAX))
    beams = options.get("beam_search")
    if beams is not None:
        if not isinstance(beams, BeamSearch):
            raise TypeError(f"beam_search is {type(beams).__name__}; give a BeamSearch")
        decoding.beam_search.width = uint_of("decoding.beam_search.width", beams.width, _UINT32_MAX)
        if beams.length_penalty is not None:
            decoding.beam_search.length_penalty = number_of("decoding.beam_search.length_penalty", beams.length_penalty)
        if beams.early_stopping is not None:
            decoding.beam_search.early_stopping = truth_of("decoding.beam_search.early_stopping", beams.early_stopping)


def _set_output(output: types_pb2.OutputParams, options: GenerateOptions) -> None:
    for name in ("token_bytes", "include_stop", "skip_special_tokens"):
        if (value := options.get(name)) is not None:
            setattr(output, name, truth_of(f"output.{name}", value))
    num_tokens, wait_s = options.get("delta_tokens"), options.get("delta_wait_s")
    if num_tokens is not None:
        output.delta_tokens = uint_of("output.delta_tokens", num_tokens, _UINT32_MAX)
    if wait_s is not None:
        wait_s = number_of("output.delta_wait", wait_s)
        if not 0 <= wait_s <= _MAX_DURATION_S:  # NaN is refused, too
            raise invalid_field("output.delta_wait", f"is {wait_s} s; give a time from 0.001 to 10 s")
        output.delta_wait.FromNanoseconds(round(wait_s * 1e9))


def _priority(value: int | None) -> int | None:
    return None if value is None else integer_of("priority", value, -_INT32_MAX, _INT32_MAX)


def _set_prompt(request: generation_pb2.GenerateRequest, prompt: Prompt, options: GenerateOptions) -> None:
    is_chat = not isinstance(prompt, str) and bool(prompt) and isinstance(prompt[0], (ChatMessage, Mapping))
    if not is_chat:
        refuse_conversation_options(options)
    if isinstance(prompt, str):
        request.text = text_of("prompt", prompt)
        return
    if isinstance(prompt, (bytes, Mapping, ChatMessage)) or not isinstance(prompt, Sequence):
        raise TypeError(f"prompt is {type(prompt).__name__}; give a str, a list of token ids or a list of ChatMessage")
    if not prompt:
        raise invalid_field("prompt", "is empty; give at least one token id or message")
    if is_chat:
        set_conversation(request.chat, prompt, options)  # type: ignore[arg-type]  # every turn is looked at
    else:
        request.token_ids.ids.extend(uint_of("prompt", token, _UINT32_MAX) for token in prompt)


def _optional_uint(field: str, value: int | None, limit: int, *, lowest: int = 0) -> int | None:
    return None if value is None else integer_of(field, value, lowest, limit)
