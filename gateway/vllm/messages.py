"""Bodies of vLLM's routes. A field that is not here is refused by name."""

from __future__ import annotations

from typing import Any

import msgspec


class TokenizeBody(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """`/tokenize`: a prompt, or a conversation. None is a field that was left out."""

    model: str | None = None
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None
    # Of a conversation.
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    tools: list[dict[str, Any]] | None = None
    # Refused by name.
    chat_template: Any = None
    mm_processor_kwargs: Any = None


class DetokenizeBody(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """`/detokenize`."""

    tokens: list[int]
    model: str | None = None
