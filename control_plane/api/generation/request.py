"""From a GenerateRequest to checked, plain values with every default in effect.

Every number is checked after parsing: protobuf truncates integers silently and lets NaN pass. Two steps, the cheap
one first: `check_request`, then (when the prompt is tokenised) `effective_max_tokens`. How tokens are chosen is checked
in `sampling_params.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from motet.v1 import generation_pb2, types_pb2

from contract.sampling import MAX_PRIORITY
from control_plane.api.generation.adapter_uses import CheckedUses, check_uses
from control_plane.api.generation.constraints import check_constraint
from control_plane.api.generation.delta_size import check_delta_size
from control_plane.api.generation.preconditions import check_preconditions
from control_plane.api.generation.sampling_params import Decoding, check_decoding, check_sampling
from control_plane.api.text.conversation import Conversation, check_conversation
from control_plane.api.text.length_bound import prompt_too_long
from control_plane.checks import Violations, check_request_id, quoted, refuse
from control_plane.errors import ContextTooLong, FieldViolation
from control_plane.fleet.requests.streams import Collecting
from control_plane.registry.versions.rollout import MAX_ROUTING_KEY_BYTES
from control_plane.scheduler.types import Sampling

DEFAULT_MAX_TOKENS = 128
MAX_STOP_STRINGS = 16
MAX_STOP_CHARS = 256
MAX_STOP_TOKEN_IDS = 256
MAX_CACHE_SALT_BYTES = 128
MAX_RENDER_TIME_S = 32_503_680_000  # the year 3000
MAX_PROMPT_LOGPROB_ENTRIES = 1 << 18  # about 3 MB; a gRPC client takes messages of up to 4 MB by default


@dataclass(frozen=True, slots=True)
class CheckedRequest:
    """A request that is well formed; the prompt is not tokenised yet."""

    client_request_id: str  # may be empty
    adapters: CheckedUses
    routing_key: str  # decides between the active version and the canary; empty: chance does
    text: str | None
    token_ids: tuple[int, ...] | None
    conversation: Conversation | None  # exactly one of text, token_ids and conversation is set
    render_time_s: float | None  # when a conversation is rendered, seconds since 1970; None: at present
    sampling: Sampling
    decoding: Decoding
    max_tokens: int | None  # None: the default
    stop: tuple[str, ...]
    stop_token_ids: frozenset[int]  # the client's own
    ignore_eos: bool
    cache_salt: bytes
    resume_from: tuple[int, ...]
    priority: int
    returns_token_bytes: bool  # with log-probabilities
    includes_stop: bool  # in the text: the stop string, or the stop token's text
    skips_special_tokens: bool  # in the text
    collecting: Collecting | None  # of tokens into larger deltas; None: every token goes out at once
    model_fingerprint: str  # the model that the request relies on; empty: any
    prompt_sha256: str  # the prompt that the request relies on; empty: any

    @property
    def input_field(self) -> str:
        return "text" if self.text is not None else "chat" if self.conversation is not None else "token_ids"


def check_request(
    request: generation_pb2.GenerateRequest, *, vocab_size: int, max_model_len: int, draw_seed: Callable[[], int]
) -> CheckedRequest:
    """The request as plain values. Raises InvalidRequest with everything that is wrong with it.

    Raises ContextTooLong, before it looks at anything else, where more token ids come than the context takes.
    """
    _check_sizes(request, max_model_len)
    violations = Violations()
    check_request_id(request.request_id, "request_id", violations)
    adapters = check_uses(request, violations)
    num_key_bytes = len(request.routing_key.encode())
    if num_key_bytes > MAX_ROUTING_KEY_BYTES:
        violations.add("routing_key", f"has {num_key_bytes} bytes; use at most {MAX_ROUTING_KEY_BYTES}")
    if len(request.cache_salt.encode()) > MAX_CACHE_SALT_BYTES:
        violations.add(
            "cache_salt", f"has {len(request.cache_salt.encode())} bytes; use at most {MAX_CACHE_SALT_BYTES}"
        )
    text, token_ids, conversation = _checked_input(request, vocab_size, violations)
    sampling = check_sampling(request.sampling, vocab_size, draw_seed, violations)
    max_tokens, min_tokens = _checked_stopping(request.stopping, vocab_size, violations)
    decoding = check_decoding(request.decoding, sampling, violations)
    if decoding.beam is not None and request.stopping.stop:
        violations.add(
            "stopping.stop", "is set with decoding.beam_search, which compares tokens and not text; use stop_token_ids"
        )
    if not -MAX_PRIORITY <= request.priority <= MAX_PRIORITY:
        violations.add("priority", f"is {request.priority}; give a value from {-MAX_PRIORITY} to {MAX_PRIORITY}")
    _check_resume(request, decoding, violations)
    resume_from = checked_token_ids(request.resume_from.ids, "resume_from.ids", vocab_size, violations)
    if max_tokens is not None and len(request.resume_from.ids) > max_tokens:
        violations.add(
            "resume_from.ids", f"{len(request.resume_from.ids)} tokens; at most stopping.max_tokens, {max_tokens}"
        )
    render_time_s = checked_render_time_s(request.chat, violations) if conversation is not None else None
    if request.output.token_bytes and sampling.num_logprobs is None and sampling.num_prompt_logprobs is None:
        violations.add(
            "output.token_bytes", "is set without sampling.logprobs and sampling.prompt_logprobs; set one of them too"
        )
    collecting = check_delta_size(request.output, violations)
    check_constraint(request, violations)
    check_preconditions(request.preconditions, violations)
    violations.raise_if_any()
    return CheckedRequest(
        client_request_id=request.request_id,
        adapters=adapters,
        routing_key=request.routing_key or request.request_id,
        text=text,
        token_ids=token_ids,
        conversation=conversation,
        render_time_s=render_time_s,
        sampling=replace(sampling, min_tokens=min_tokens),
        decoding=decoding,
        max_tokens=max_tokens,
        stop=tuple(request.stopping.stop),
        stop_token_ids=frozenset(request.stopping.stop_token_ids),
        ignore_eos=request.stopping.ignore_eos,
        cache_salt=request.cache_salt.encode(),
        resume_from=resume_from,
        priority=request.priority,
        returns_token_bytes=request.output.token_bytes,
        includes_stop=request.output.include_stop,
        skips_special_tokens=request.output.skip_special_tokens
        if request.output.HasField("skip_special_tokens")
        else True,
        collecting=collecting,
        model_fingerprint=request.preconditions.model_fingerprint,
        prompt_sha256=request.preconditions.prompt_sha256,
    )


def effective_max_tokens(
    checked: CheckedRequest, num_prompt_tokens: int, max_model_len: int, default: int = DEFAULT_MAX_TOKENS
) -> int:
    """How many tokens may be generated; `default` where the client sets no limit.

    Raises ContextTooLong where prompt and max_tokens exceed the context, InvalidRequest where min_tokens exceeds both.
    """
    left = max_model_len - num_prompt_tokens
    if left < 1:
        raise prompt_too_long(checked.input_field, f"{num_prompt_tokens} tokens", max_model_len)
    if checked.max_tokens is None:
        # A resumed stream without max_tokens goes on to where the unbroken one would have ended.
        max_tokens = min(default, left)
    elif checked.max_tokens > left:
        raise ContextTooLong(
            FieldViolation(
                "stopping.max_tokens",
                f"is {checked.max_tokens}, which after a prompt of {num_prompt_tokens} tokens exceeds the context of "
                f"{max_model_len} tokens; at most {left} are left",
            )
        )
    else:
        max_tokens = checked.max_tokens
    if checked.sampling.min_tokens > max_tokens:
        raise refuse(
            "stopping.min_tokens",
            f"is {checked.sampling.min_tokens}; give at most {max_tokens}, the max_tokens in effect",
        )
    if len(checked.resume_from) > max_tokens:
        raise ContextTooLong(
            FieldViolation(
                "resume_from.ids", f"{len(checked.resume_from)} tokens; at most {max_tokens}, the max_tokens in effect"
            )
        )
    return max_tokens


def effective_stop_token_ids(checked: CheckedRequest, eos_token_ids: Sequence[int], vocab_size: int) -> frozenset[int]:
    """The tokens that end a completion. Raises InvalidRequest where min_tokens would leave no token to choose."""
    known = [token_id for token_id in eos_token_ids if token_id < vocab_size]  # a smaller vocabulary may lack some
    token_ids = checked.stop_token_ids if checked.ignore_eos else checked.stop_token_ids.union(known)
    if checked.sampling.min_tokens and len(token_ids) >= vocab_size:
        raise refuse(
            "stopping.stop_token_ids",
            f"{len(checked.stop_token_ids)} ids, which with the end-of-sequence tokens are the whole vocabulary of "
            f"{vocab_size}: min_tokens would leave no token to choose; name fewer, or set min_tokens to 0",
        )
    return token_ids


def check_prompt_logprobs(checked: CheckedRequest, num_prompt_tokens: int) -> None:
    """Raises InvalidRequest if the requested log-probabilities would not fit into one message."""
    num_logprobs = checked.sampling.num_prompt_logprobs
    if num_logprobs is None:
        return
    num_entries = (num_prompt_tokens - 1) * (num_logprobs + 1)
    most = MAX_PROMPT_LOGPROB_ENTRIES // (4 if checked.returns_token_bytes else 1)
    if num_entries > most:
        raise refuse(
            "sampling.prompt_logprobs",
            f"{num_logprobs} for a prompt of {num_prompt_tokens} tokens gives {num_entries} log-probabilities; at most "
            f"{most} in all; ask for fewer or shorten the prompt",
        )


def _checked_input(
    request: generation_pb2.GenerateRequest, vocab_size: int, violations: Violations
) -> tuple[str | None, tuple[int, ...] | None, Conversation | None]:
    kind = request.WhichOneof("input")
    if kind == "text":
        if not request.text:
            violations.add("text", "is empty; a prompt needs at least one token")
        return request.text, None, None
    if kind == "token_ids":
        if not request.token_ids.ids:
            violations.add("token_ids.ids", "is empty; a prompt needs at least one token")
        return None, checked_token_ids(request.token_ids.ids, "token_ids.ids", vocab_size, violations), None
    if kind == "chat":
        return None, None, check_conversation(request.chat, violations)
    violations.add("input", "is not set; send one of text, token_ids and chat")
    return None, None, None


def _check_sizes(request: generation_pb2.GenerateRequest, max_model_len: int) -> None:
    """What is far too long is refused by its length alone: to read a million token ids takes tens of milliseconds."""
    if len(request.token_ids.ids) >= max_model_len:
        raise prompt_too_long("token_ids", f"{len(request.token_ids.ids)} tokens", max_model_len)
    if len(request.resume_from.ids) >= max_model_len:
        raise ContextTooLong(
            FieldViolation(
                "resume_from.ids",
                f"{len(request.resume_from.ids)} tokens; at most {max_model_len - 1}, one less than the context of "
                f"{max_model_len} tokens",
            )
        )


def checked_render_time_s(chat: types_pb2.ChatMessages, violations: Violations) -> float | None:
    """When the conversation is to be rendered, seconds since 1970; None: at present."""
    if not chat.HasField("render_time"):
        return None
    moment = chat.render_time
    if not (0 <= moment.seconds <= MAX_RENDER_TIME_S and 0 <= moment.nanos < 10**9):
        violations.add(
            "chat.render_time", f"is {moment.seconds} s and {moment.nanos} ns since 1970; use a time from 1970 to 3000"
        )
    return moment.seconds + moment.nanos / 1e9


def checked_token_ids(ids: Sequence[int], field: str, vocab_size: int, violations: Violations) -> tuple[int, ...]:
    """Token ids of the client. Adds a violation for the first one that the vocabulary lacks."""
    # Through numpy: a repeated field gives its ids one by one, at ten times the price.
    values = np.asarray(ids, dtype=np.uint32)
    unknown = values >= vocab_size
    if unknown.any():
        index = int(unknown.argmax())
        violations.add(f"{field}[{index}]", f"{values[index]} is not below the vocabulary size {vocab_size}")
    return tuple(values.tolist())


def _check_resume(request: generation_pb2.GenerateRequest, decoding: Decoding, violations: Violations) -> None:
    if not request.resume_from.ids:
        return
    if decoding.num_indices > 1:
        violations.add(
            "resume_from",
            f"is set with {decoding.num_indices} completions; only one can be continued, so send a new request",
        )
    if request.sampling.HasField("prompt_logprobs"):
        violations.add(
            "sampling.prompt_logprobs",
            "is set with resume_from; the first stream returned them already, so leave it unset",
        )


def _checked_stopping(
    params: types_pb2.StoppingParams, vocab_size: int, violations: Violations
) -> tuple[int | None, int]:
    """max_tokens, None where unset, and min_tokens."""
    if len(params.stop) > MAX_STOP_STRINGS:
        violations.add("stopping.stop", f"has {len(params.stop)} stop strings; use at most {MAX_STOP_STRINGS}")
    for index, stop in enumerate(params.stop[: MAX_STOP_STRINGS + 1]):
        if not 1 <= len(stop) <= MAX_STOP_CHARS:
            violations.add(
                f"stopping.stop[{index}]", f"{quoted(stop)} has {len(stop)} characters; use 1 to {MAX_STOP_CHARS}"
            )
    if len(params.stop_token_ids) > MAX_STOP_TOKEN_IDS:
        violations.add(
            "stopping.stop_token_ids", f"has {len(params.stop_token_ids)} ids; use at most {MAX_STOP_TOKEN_IDS}"
        )
    else:
        checked_token_ids(params.stop_token_ids, "stopping.stop_token_ids", vocab_size, violations)
    if not params.HasField("max_tokens"):
        return None, params.min_tokens
    if params.max_tokens < 1:
        violations.add("stopping.max_tokens", f"is {params.max_tokens}; give at least 1")
    elif params.min_tokens > params.max_tokens:
        violations.add(
            "stopping.min_tokens", f"is {params.min_tokens}; give at most stopping.max_tokens, {params.max_tokens}"
        )
    return params.max_tokens, params.min_tokens
