"""The body of `/v1/responses`. Fields that it does not declare are refused by name, and so are some that it does."""

from __future__ import annotations

from typing import Any

from gateway.openai.messages import Generated


class ResponsesBody(Generated, kw_only=True):
    """`/v1/responses`."""

    input: str | list[dict[str, Any]]
    instructions: str | None = None
    max_output_tokens: int | None = None
    top_logprobs: int | None = None
    text: dict[str, Any] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    include: list[str] | None = None
    # vLLM's.
    chat_template_kwargs: dict[str, Any] | None = None
    # Accepted where they change nothing.
    background: Any = None
    truncation: Any = None
    reasoning: Any = None
    # Refused by name.
    previous_response_id: Any = None
    conversation: Any = None
    prompt: Any = None
    max_tool_calls: Any = None
