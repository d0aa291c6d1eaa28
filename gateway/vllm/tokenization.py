"""`/tokenize` and `/detokenize`, as vLLM's server has them."""

from __future__ import annotations

import asyncio
from typing import Any

from motet import AsyncClient, InvalidArgument, Tokenized
from motet.model.calls import TextInput, TokenizeOptions

from gateway.openai.errors import refused
from gateway.openai.models import Models, Source
from gateway.openai.replies import token_text
from gateway.vllm.messages import DetokenizeBody, TokenizeBody

_OF_CONVERSATIONS = ("add_generation_prompt", "continue_final_message", "chat_template_kwargs", "tools")
MAX_TOKENS_AT_ONCE = 4096  # written as text in one turn of the event loop: 1 ms
_REFUSED = ("chat_template", "mm_processor_kwargs")


async def tokenized(body: TokenizeBody, models: Models, client: AsyncClient) -> dict[str, Any]:
    """The response. Raises Refusal, MotetError."""
    prompt, options = _input_of(body)
    source = await _source_of(body.model, models, client)
    if source.digest:
        options["adapter_digest"] = source.digest
    found = await client.model.tokenize(prompt, adapter=source.adapter, **options)
    texts = await _texts_of(found) if body.return_token_strs else None
    return {
        "count": len(found.token_ids),
        "max_model_len": found.max_model_len,
        "tokens": list(found.token_ids),
        "token_strs": texts,
    }


async def detokenized(body: DetokenizeBody, models: Models, client: AsyncClient) -> dict[str, Any]:
    """The response. Raises Refusal, MotetError."""
    source = await _source_of(body.model, models, client)
    try:
        text = await client.model.detokenize(body.tokens, adapter=source.adapter, adapter_digest=source.digest)
    except InvalidArgument as error:  # of the tokens: the model has been found
        raise refused("tokens", error.message) from error
    return {"prompt": text}


async def _texts_of(found: Tokenized) -> list[str]:
    """Each token as text. They are written in pieces, between which the event loop serves other requests."""
    texts: list[str] = []
    for start in range(0, len(found.token_ids), MAX_TOKENS_AT_ONCE):
        if start:
            await asyncio.sleep(0)
        piece = slice(start, start + MAX_TOKENS_AT_ONCE)
        both = zip(found.tokens[piece], found.token_ids[piece], strict=True)
        texts += [token_text(token, token_id) for token, token_id in both]
    return texts


async def _source_of(model: str | None, models: Models, client: AsyncClient) -> Source:
    """The base model where none is named, as in vLLM."""
    return Source() if model is None else await models.resolve(model, client)


def _input_of(body: TokenizeBody) -> tuple[TextInput, TokenizeOptions]:
    for name in _REFUSED:
        if getattr(body, name) is not None:
            raise refused(name, "is not served; leave it out")
    if (body.prompt is None) == (body.messages is None):
        raise refused("prompt", "give either prompt or messages")
    options = TokenizeOptions(return_tokens=bool(body.return_token_strs))
    if body.add_special_tokens is not None:
        options["add_special_tokens"] = body.add_special_tokens
    if body.messages is None:
        for name in _OF_CONVERSATIONS:
            if getattr(body, name) is not None:
                raise refused(name, "belongs to messages; leave it out beside prompt")
        assert body.prompt is not None, "checked above"
        return body.prompt, options
    if body.add_generation_prompt is not None:
        options["add_generation_prompt"] = body.add_generation_prompt
    if body.continue_final_message:
        options["continue_final_message"] = True
    if body.chat_template_kwargs:
        options["template_kwargs"] = body.chat_template_kwargs
    if body.tools:
        options["tools"] = body.tools
    return body.messages, options
