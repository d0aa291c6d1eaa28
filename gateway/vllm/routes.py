"""vLLM's routes. All but `/version` and `/health` need a key where Motet does."""

from __future__ import annotations

import msgspec
from motet import __version__
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from gateway.http.bodies import Bodies
from gateway.http.upstream import Upstream
from gateway.openai.handlers import decoded
from gateway.openai.models import Models
from gateway.vllm import loras
from gateway.vllm.messages import DetokenizeBody, TokenizeBody
from gateway.vllm.tokenization import detokenized, tokenized


def vllm_routes(upstream: Upstream, bodies: Bodies, models: Models, timeout_s: float) -> list[Route]:
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

    return [
        Route("/tokenize", tokenize, methods=["POST"]),
        Route("/detokenize", detokenize, methods=["POST"]),
        Route("/v1/load_lora_adapter", load_adapter, methods=["POST"]),
        Route("/v1/unload_lora_adapter", unload_adapter, methods=["POST"]),
        Route("/version", version, methods=["GET"]),
        Route("/health", health, methods=["GET"]),
    ]


def _json(content: object) -> Response:
    return Response(msgspec.json.encode(content), media_type="application/json")
