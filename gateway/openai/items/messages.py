"""The body of `/v1/responses`. A field that is not here is refused by name; so is one that is here in order to be."""

from __future__ import annotations

from typing import Any

import msgspec

from gateway.openai.messages import StreamOptions


class ResponsesBody(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """`/v1/responses`. None is a field that was left out."""

    model: str
    input: str | list[dict[str, Any]]
    instructions: str | None = None
    max_output_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_logprobs: int | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    text: dict[str, Any] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    include: list[str] | None = None
    metadata: Any = None  # returned
    # vLLM's.
    seed: int | None = None
    stop: str | list[str] | None = None
    logit_bias: dict[str, float] | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    min_tokens: int | None = None
    ignore_eos: bool | None = None
    cache_salt: str | None = None
    priority: int | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    # Accepted where they change nothing.
    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    store: Any = None
    background: Any = None
    truncation: Any = None
    service_tier: Any = None
    reasoning: Any = None
    # Refused by name.
    previous_response_id: Any = None
    conversation: Any = None
    prompt: Any = None
    max_tool_calls: Any = None
