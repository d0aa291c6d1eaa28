"""vLLM's routes. All but `/version` and `/health` need a key where Motet does."""

from __future__ import annotations

from typing import Any

import msgspec
from motet import __version__
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response

from gateway.http.bodies import Bodies
from gateway.http.described import JSON, Described, Description
from gateway.http.upstream import Upstream
from gateway.openai.handlers import decoded
from gateway.openai.models import Models
from gateway.vllm import loras
from gateway.vllm.messages import DetokenizeBody, TokenizeBody
from gateway.vllm.tokenization import detokenized, tokenized


def vllm_routes(upstream: Upstream, bodies: Bodies, models: Models, timeout_s: float) -> list[Described]:
    """The routes, for an application with EXCEPTION_HANDLERS. `timeout_s` bounds loading and unloading."""

    async def tokenize(request: Request) -> Response:
        body = await decoded(bodies, request, TokenizeBody)
        return _json(await tokenized(body, models, upstream.client))

    async def detokenize(request: Request) -> Response:
        body = await decoded(bodies, request, DetokenizeBody)
        return _json(await detokenized(body, models, upstream.client))

    async def load_adapter(request: Request) -> Response:
        body = await decoded(bodies, request, loras.LoadBody)
        return PlainTextResponse(await loras.load(body, upstream.client, timeout_s))

    async def unload_adapter(request: Request) -> Response:
        body = await decoded(bodies, request, loras.UnloadBody)
        return PlainTextResponse(await loras.unload(body, upstream.client, timeout_s))

    async def version(_request: Request) -> Response:
        return JSONResponse({"version": __version__})

    async def health(_request: Request) -> Response:
        return Response(status_code=200 if await upstream.is_reachable() else 503)

    def about(summary: str, body: Any = None, media: str = JSON, *, is_open: bool = False) -> Description:
        return Description(summary=summary, body=body, response_media=(media,), is_open=is_open)

    text, load, unload = "text/plain", "/v1/load_lora_adapter", "/v1/unload_lora_adapter"
    return [
        Described("POST", "/tokenize", tokenize, about("Token ids of a text or a conversation", TokenizeBody)),
        Described("POST", "/detokenize", detokenize, about("The text of token ids", DetokenizeBody)),
        Described("POST", load, load_adapter, about("Register an adapter from a root", loras.LoadBody, text)),
        Described("POST", unload, unload_adapter, about("Delete an adapter", loras.UnloadBody, text)),
        Described("GET", "/version", version, about("The version of Motet", is_open=True)),
        Described("GET", "/health", health, about("Motet's server responds", media=text, is_open=True)),
    ]


def _json(content: object) -> Response:
    return Response(msgspec.json.encode(content), media_type="application/json")
