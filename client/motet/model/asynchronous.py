"""The calls about the model and its tokenizer, with asyncio."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Unpack

from motet.model.calls import (
    ModelFacts,
    TextInput,
    Tokenized,
    TokenizeOptions,
    detokenize_call,
    facts_call,
    tokenize_call,
)

if TYPE_CHECKING:
    from motet.aio import AsyncClient


class AsyncModel:
    """The model and its tokenizer, at `client.model`."""

    def __init__(self, client: AsyncClient) -> None:
        self._client = client

    async def facts(self, adapter: str = "") -> ModelFacts:
        """Sizes, special tokens and defaults of the base model, or of `adapter`."""
        return await self._client.send(facts_call(adapter))

    async def tokenize(self, prompt: TextInput, *, adapter: str = "", **options: Unpack[TokenizeOptions]) -> Tokenized:
        """The token ids that generate() makes of a text or a conversation. TokenizeOptions lists further arguments."""
        return await self._client.send(tokenize_call(prompt, adapter, options))

    async def detokenize(
        self,
        token_ids: Sequence[int],
        *,
        adapter: str = "",
        adapter_digest: str = "",
        skip_special_tokens: bool = False,
    ) -> str:
        """The text of token ids. `adapter_digest`: one version of it. `skip_special_tokens`: leave those out."""
        return await self._client.send(detokenize_call(token_ids, adapter, skip_special_tokens, adapter_digest))
