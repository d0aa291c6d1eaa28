"""Bodies of requests. Fields that no class declares are refused by name, and so are some that are declared."""

from __future__ import annotations

from typing import Any

import msgspec


class StreamOptions(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """`stream_options`."""

    include_usage: bool | None = None
    include_obfuscation: bool | None = None


class Generated(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """What completions, chat completions and responses have in common. None is a field that was left out."""

    model: str
    temperature: float | None = None
    top_p: float | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    logit_bias: dict[str, float] | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    # vLLM's.
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    ignore_eos: bool | None = None
    min_tokens: int | None = None
    cache_salt: str | None = None
    priority: int | None = None
    # Accepted where they change nothing.
    user: str | None = None
    safety_identifier: str | None = None
    metadata: Any = None
    store: Any = None
    service_tier: Any = None
    prompt_cache_key: str | None = None


class Body(Generated, kw_only=True):
    """What completions and chat completions have in common."""

    max_tokens: int | None = None
    n: int | None = None
    # vLLM's.
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    # Accepted where it changes nothing.
    truncate_prompt_tokens: Any = None
    # Refused by name.
    prompt_logprobs: Any = None
    return_token_ids: Any = None
    use_beam_search: Any = None
    length_penalty: Any = None
    response_format: Any = None
    structured_outputs: Any = None


class CompletionBody(Body):
    """`/v1/completions`."""

    prompt: str | list[str | int | list[int]]
    best_of: int | None = None
    echo: bool | None = None
    logprobs: int | None = None
    suffix: Any = None


class ChatBody(Body):
    """`/v1/chat/completions`."""

    messages: list[dict[str, Any]]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    # Accepted where they change nothing.
    verbosity: Any = None
    modalities: Any = None
    # Refused by name.
    functions: Any = None
    function_call: Any = None
    audio: Any = None
    prediction: Any = None
    web_search_options: Any = None
    reasoning_effort: Any = None
    chat_template: Any = None
