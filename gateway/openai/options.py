"""What a body is in Motet's terms, and what of it is refused by name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from motet import GenerateOptions

from contract.sampling import MAX_PRIORITY
from gateway.openai.chats.tool_choice import ToolChoice
from gateway.openai.errors import refused
from gateway.openai.formats import constraint_of
from gateway.openai.messages import Body, ChatBody, CompletionBody

DEFAULT_TEMPERATURE = 1.0  # OpenAI's; Motet's own is 0
DEFAULT_COMPLETION_TOKENS = 16  # of /v1/completions
MAX_TOP_LOGPROBS = 20

# OpenAI's own bounds of `metadata`. All of a body is kept until its response ends, what changes nothing included.
MAX_PAIRS, MAX_KEY_CHARS, MAX_VALUE_CHARS = 16, 64, 512
MAX_NAME_CHARS = 1024

_NOT_SERVED = "is not served"
_REFUSED: Mapping[str, str] = {
    "prompt_logprobs": "is served over gRPC only",
    "return_token_ids": _NOT_SERVED,
    "use_beam_search": "is served over gRPC only",
    "length_penalty": "is for beam search, which is served over gRPC only",
    "suffix": _NOT_SERVED,
    "functions": "is not served; give tools",
    "function_call": "is not served; give tool_choice",
    "audio": _NOT_SERVED,
    "prediction": _NOT_SERVED,
    "web_search_options": _NOT_SERVED,
    "reasoning_effort": "is not served; give chat_template_kwargs that the checkpoint's template knows",
    "chat_template": "is not served: the checkpoint's own is used",
}
# Values at which a refused field, or one that is only accepted, changes nothing.
_NEUTRAL: Mapping[str, tuple[object, ...]] = {
    "use_beam_search": (False,),
    "return_token_ids": (False,),
    "store": (False,),
    "service_tier": ("auto", "default"),
    "verbosity": ("medium",),
    "modalities": (["text"],),
    "suffix": ("",),
    "truncate_prompt_tokens": (),
}
# The same name and meaning in Motet.
_SAME = (
    "top_p",
    "n",
    "frequency_penalty",
    "presence_penalty",
    "min_p",
    "repetition_penalty",
    "ignore_eos",
    "min_tokens",
    "skip_special_tokens",
)


def check_names(body: Any) -> None:
    """Raise Refusal where a field that changes nothing is longer than anything that it is for."""
    for name in ("user", "safety_identifier", "prompt_cache_key"):
        if (length := len(getattr(body, name, None) or "")) > MAX_NAME_CHARS:
            raise refused(name, f"has {length} characters; at most {MAX_NAME_CHARS} are taken")
    metadata = getattr(body, "metadata", None)
    if metadata is None:
        return
    if not isinstance(metadata, dict) or len(metadata) > MAX_PAIRS:
        raise refused("metadata", f"is not an object with at most {MAX_PAIRS} members")
    for key, value in metadata.items():
        if len(key) > MAX_KEY_CHARS or not isinstance(value, str) or len(value) > MAX_VALUE_CHARS:
            raise refused(
                "metadata",
                f"the member {key[:MAX_KEY_CHARS]!r} is not a text of at most {MAX_VALUE_CHARS} characters with a name "
                f"of at most {MAX_KEY_CHARS}",
            )


def check(body: Body) -> None:
    """Raise Refusal for a field that is not served, or not at its value."""
    check_names(body)
    for name in {**_REFUSED, **_NEUTRAL}:
        value = getattr(body, name, None)
        if value is not None and value not in _NEUTRAL.get(name, ()):
            raise refused(name, f"{_REFUSED.get(name, 'is not served at this value')}; leave it out")
    options = body.stream_options
    if options is not None and not body.stream:
        raise refused("stream_options", "is for streams; give stream, or leave it out")
    if options is not None and options.include_obfuscation:
        raise refused("stream_options", "include_obfuscation is not served; leave it out, or give false")


def completion_options(body: CompletionBody) -> GenerateOptions:
    """Options of a completion. Raises Refusal."""
    check(body)
    options = _options(body)
    options["max_tokens"] = DEFAULT_COMPLETION_TOKENS if body.max_tokens is None else body.max_tokens
    if body.best_of is not None:
        if body.stream and body.best_of > (body.n or 1):
            raise refused("best_of", "is not streamed: the best are known at the end; leave out stream or best_of")
        options["best_of"] = body.best_of
    if body.logprobs is not None:
        if body.echo:
            raise refused("echo", "is not served together with logprobs; leave one of them out")
        _set_logprobs(options, "logprobs", body.logprobs)
    return options


def chat_options(body: ChatBody, choice: ToolChoice) -> GenerateOptions:
    """Options of a chat completion. Raises Refusal."""
    check(body)
    options = _options(body)
    if body.max_tokens is not None and body.max_completion_tokens not in (None, body.max_tokens):
        raise refused("max_tokens", "differs from max_completion_tokens, which replaces it; leave one of them out")
    options["max_tokens"] = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    if body.top_logprobs and not body.logprobs:
        raise refused("top_logprobs", "needs logprobs; give true, or leave top_logprobs out")
    if body.logprobs:
        _set_logprobs(options, "top_logprobs", body.top_logprobs or 0)
    if choice.is_offered and body.tools:
        options["tools"] = body.tools
    if body.chat_template_kwargs:
        options["template_kwargs"] = body.chat_template_kwargs
    if body.add_generation_prompt is not None:
        options["add_generation_prompt"] = body.add_generation_prompt
    if body.continue_final_message:
        options["continue_final_message"] = True
    if not body.messages:
        raise refused("messages", "is empty; give at least one message")
    return options


def prompts_of(body: CompletionBody, max_prompts: int) -> list[str | list[int]]:
    """Each prompt of a completions request, a text or token ids. Raises Refusal."""
    given = body.prompt
    prompts: list[str | list[int]] = []
    if isinstance(given, str):
        prompts = [given]
    elif given and all(isinstance(item, int) for item in given):
        prompts = [[item for item in given if isinstance(item, int)]]
    else:
        prompts = [item for item in given if not isinstance(item, int)]
        if len(prompts) != len(given) or len({type(item) for item in prompts}) > 1:
            raise refused("prompt", "mixes texts, token ids and lists of them; give one kind")
    if not prompts or not all(prompts):
        raise refused("prompt", "is empty; give a text, token ids, or a list of either")
    if len(prompts) > max_prompts:
        raise refused("prompt", f"has {len(prompts)} prompts; --max-prompts allows {max_prompts} in one request")
    return prompts


def _options(body: Body) -> GenerateOptions:
    options = GenerateOptions(temperature=DEFAULT_TEMPERATURE if body.temperature is None else body.temperature)
    for name in _SAME:
        if (value := getattr(body, name)) is not None:
            options[name] = value  # type: ignore[literal-required]  # the names are GenerateOptions'
    if body.seed is not None:
        options["seed"] = _seed(body.seed)
    if body.priority is not None:
        options["priority"] = priority_of(body.priority)
    if body.top_k not in (None, -1, 0):  # vLLM's words for all tokens
        options["top_k"] = body.top_k
    if body.stop:
        options["stop"] = body.stop
    if body.stop_token_ids:
        options["stop_token_ids"] = body.stop_token_ids
    if body.include_stop_str_in_output:
        options["include_stop"] = True
    if body.cache_salt:
        options["cache_salt"] = body.cache_salt
    if (constraint := constraint_of(body)) is not None:
        options["constraint"] = constraint
    if body.logit_bias:
        options["logit_bias"] = {_token_id(token): bias for token, bias in body.logit_bias.items()}
    return options


def priority_of(given: int) -> int:
    """vLLM's lower values are first, Motet's higher ones. Raises Refusal."""
    if not -MAX_PRIORITY <= given <= MAX_PRIORITY:
        raise refused("priority", f"is {given}; give a value from {-MAX_PRIORITY} to {MAX_PRIORITY}")
    return -given


def _seed(given: int) -> int:
    """OpenAI's seeds are signed, Motet's are not: each has the other's bits."""
    if not -(2**63) <= given < 2**64:
        raise refused("seed", f"is {given}; give an integer from -2^63 to 2^64 - 1")
    return given % 2**64


def _token_id(text: str) -> int:
    if not (text.isascii() and text.isdecimal() and len(text) <= 10):
        raise refused("logit_bias", "has a key that is not the id of a token")
    return int(text)


def _set_logprobs(options: GenerateOptions, name: str, count: int) -> None:
    if not 0 <= count <= MAX_TOP_LOGPROBS:
        raise refused(name, f"is {count}; give 0 to {MAX_TOP_LOGPROBS}")
    options["logprobs"] = count
    options["token_bytes"] = True
