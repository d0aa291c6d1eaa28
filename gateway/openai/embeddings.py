"""`/v1/embeddings`: vectors of texts or token ids, by the base model or an adapter."""

from __future__ import annotations

import array
import base64
import sys
from typing import Any

import msgspec
from motet import AsyncClient
from motet.pooling.calls import Embedding, PoolingOptions

from gateway.openai.errors import refused
from gateway.openai.models import Models
from gateway.openai.options import check_names, priority_of

MAX_INPUTS = 64  # of one request, as in Motet's Embed


class EmbeddingBody(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """`/v1/embeddings`. None is a field that was left out."""

    model: str
    input: str | list[str | int | list[int]]
    encoding_format: str | None = None
    dimensions: int | None = None
    # vLLM's.
    priority: int | None = None
    cache_salt: str | None = None
    # Accepted where they change nothing.
    user: str | None = None
    truncate_prompt_tokens: Any = None


async def embeddings(body: EmbeddingBody, models: Models, client: AsyncClient, timeout_s: float) -> dict[str, Any]:
    """The response. Raises Refusal, MotetError."""
    check_names(body)
    inputs = _inputs_of(body)
    if body.encoding_format not in (None, "float", "base64"):
        raise refused("encoding_format", "is not float or base64")
    if body.truncate_prompt_tokens is not None:
        raise refused("truncate_prompt_tokens", "is not served at this value; leave it out")
    source = await models.resolve(body.model, client, is_checked=True)
    options = PoolingOptions()
    if source.digest:
        options["adapter_digest"] = source.digest
    if source.fingerprint:
        options["model_fingerprint"] = source.fingerprint
    if body.priority is not None:
        options["priority"] = priority_of(body.priority)
    if body.cache_salt:
        options["cache_salt"] = body.cache_salt
    found = await client.embed(
        inputs, adapter=source.adapter, dimensions=body.dimensions, timeout_s=timeout_s, **options
    )
    num_tokens = sum(each.prompt_tokens for each in found.embeddings)
    is_packed = body.encoding_format == "base64"
    return {
        "object": "list",
        "model": body.model,
        "data": [
            {"object": "embedding", "index": index, "embedding": _packed(each) if is_packed else each.values}
            for index, each in enumerate(found.embeddings)
        ],
        "usage": {"prompt_tokens": num_tokens, "total_tokens": num_tokens},
    }


def _packed(embedding: Embedding) -> str:
    """Little-endian float32 in base64."""
    values = array.array("f", embedding.values)
    if sys.byteorder == "big":
        values.byteswap()
    return base64.b64encode(values.tobytes()).decode()


def _inputs_of(body: EmbeddingBody) -> list[str | list[int]]:
    given = body.input
    inputs: list[str | list[int]]
    if isinstance(given, str):
        inputs = [given]
    elif given and all(isinstance(item, int) for item in given):
        inputs = [[item for item in given if isinstance(item, int)]]
    else:
        inputs = [item for item in given if not isinstance(item, int)]
        if len(inputs) != len(given):
            raise refused("input", "mixes token ids with texts or lists; give one kind")
    if not inputs or not all(inputs):
        raise refused("input", "is empty; give a text, token ids, or a list of either")
    if len(inputs) > MAX_INPUTS:
        raise refused("input", f"has {len(inputs)} inputs; one request takes {MAX_INPUTS}")
    return inputs
