"""Routes of the Tinker protocol below `/api/v1`, and what is refused there by name."""

from __future__ import annotations

import http
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from motet import MotetError
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp

from gateway.http.bodies import Bodies
from gateway.http.described import JSON, Described, Description
from gateway.http.errors import Refusal, client_gone
from gateway.http.keys import Keys
from gateway.http.upstream import Upstream
from gateway.tinker import messages
from gateway.tinker.errors import response_to
from gateway.tinker.samples import Samples
from gateway.tinker.sessions import BASE, SCHEME, check_session_id, new_session_id, resolve, sampling_id, source_of

KEY_PREFIX = "tml-"  # the SDK takes no API key without it
_BAD_REQUEST = 400

Handler = Callable[[Request], Awaitable[Response]]

TRAINING = (
    "copy_weights",
    "create_custom_loss",
    "create_model",
    "forward",
    "forward_backward",
    "get_info",
    "load_weights",
    "optim_step",
    "save_weights",
    "save_weights_external",
    "save_weights_for_sampler",
    "unload_model",
)


def tinker_routes(upstream: Upstream, samples: Samples, bodies: Bodies, base_names: tuple[str, ...]) -> list[Described]:
    """The routes, below `/api/v1`."""
    sessions = _Sessions(upstream, bodies, base_names)
    posts: Mapping[str, tuple[Handler, Any]] = {
        "client/config": (_client_config, None),
        "client/dynamic_config": (_dynamic_config, None),
        "create_session": (sessions.create, messages.CreateSession),
        "session_heartbeat": (sessions.heartbeat, messages.SessionHeartbeat),
        "sessions/{session_id}/finish": (sessions.finish, None),
        "create_sampling_session": (sessions.create_sampling, messages.CreateSamplingSession),
        "telemetry": (sessions.drop_telemetry, None),
        **{action: (samples.handler(action), body) for action, body in samples.bodies.items()},
        **dict.fromkeys(TRAINING, (_refuse_training, None)),
    }
    gets: Mapping[str, Handler] = {
        "healthz": _healthz,
        "get_server_capabilities": sessions.capabilities,
        "samplers/{sampling_session_id}": sessions.sampler,
    }
    of_samples = Description(summary="", response_media=(JSON, "application/x-protobuf"))
    return [
        *(
            Described("POST", f"/{path}", handler, replace(of_samples, summary=f"Tinker: {path}", body=body))
            for path, (handler, body) in posts.items()
        ),
        *(
            Described("GET", f"/{path}", handler, Description(summary=f"Tinker: {path}", is_open=path == "healthz"))
            for path, handler in gets.items()
        ),
    ]


def tinker_app(routes: Sequence[Described]) -> ASGIApp:
    """The protocol as an ASGI application, to be mounted at `/api/v1`."""
    app = Starlette(
        routes=routes,
        exception_handlers={
            Refusal: _refused,
            MotetError: _refused,
            HTTPException: _no_route,
            ClientDisconnect: client_gone,
        },
    )
    return Keys(app, prefix=KEY_PREFIX)


class _Sessions:
    """Sessions of clients, and what is sampled from. Their ids say everything, so that nothing is kept."""

    def __init__(self, upstream: Upstream, bodies: Bodies, base_names: tuple[str, ...]) -> None:
        self._upstream = upstream
        self._bodies = bodies
        self._own_names = base_names

    async def create(self, request: Request) -> Response:
        await self._bodies.decode(request, messages.CreateSession)
        await self._upstream.client.status()  # a key that is not valid is refused here, not at the first sample
        return JSONResponse({"type": "create_session", "session_id": new_session_id()})

    async def heartbeat(self, request: Request) -> Response:
        check_session_id((await self._bodies.decode(request, messages.SessionHeartbeat)).session_id)
        return JSONResponse({"type": "session_heartbeat"})

    async def finish(self, request: Request) -> Response:
        check_session_id(request.path_params["session_id"])
        return JSONResponse({})

    async def create_sampling(self, request: Request) -> Response:
        body = await self._bodies.decode(request, messages.CreateSamplingSession)
        if body.base_model is None and body.model_path is None:
            raise Refusal(_BAD_REQUEST, "model_path and base_model: both are missing; give one")
        if body.base_model is not None:
            names = await self._base_names()
            if body.base_model not in names:
                raise Refusal(
                    404, f"base_model: {body.base_model!r} is not served; the base model here is {names[0]!r}"
                )
        source = BASE if body.model_path is None else await resolve(body.model_path, self._upstream.client)
        made = sampling_id(body.session_id, body.sampling_session_seq_id, source)
        return JSONResponse({"type": "create_sampling_session", "sampling_session_id": made})

    async def sampler(self, request: Request) -> Response:
        made = request.path_params["sampling_session_id"]
        path, [name, *_] = source_of(made).path, await self._base_names()
        return JSONResponse({"sampler_id": made, "base_model": name, "model_path": path})

    async def capabilities(self, _request: Request) -> Response:
        length = (await self._upstream.client.status()).model.max_model_len
        names = await self._base_names()
        model = {"max_context_length": length or None, "trainable": False, "sampleable": True}
        return JSONResponse({"supported_models": [{"model_name": name, **model} for name in names]})

    async def drop_telemetry(self, request: Request) -> Response:
        """What the SDK reports of itself is for the maker of the SDK: it is dropped unread."""
        await self._bodies.read(request)
        return JSONResponse({"status": "accepted"})

    async def _base_names(self) -> list[str]:
        """Names of the base model, the one that clients see first."""
        return [*self._own_names, (await self._upstream.client.status()).model.name]


async def _client_config(_request: Request) -> Response:
    """Settings of the SDK where its own default does not fit; what is not here keeps its default."""
    return JSONResponse({"sample_use_retrieve_futures": False, "sample_join_sampling_session": False})


async def _dynamic_config(_request: Request) -> Response:
    return JSONResponse({"sample_cancel_enabled": True})


async def _healthz(_request: Request) -> Response:
    return JSONResponse({"status": "ok"})


async def _refuse_training(request: Request) -> Response:
    name = request.url.path.rpartition("/")[2]
    raise Refusal(
        _BAD_REQUEST,
        f"{name}: Motet serves models and does not train them. Train elsewhere, push each version with PushVersion "
        f"(client.adapters.push in Motet's SDK), then sample from {SCHEME}NAME@NUMBER",
    )


async def _refused(_request: Request, error: Exception) -> Response:
    assert isinstance(error, (Refusal, MotetError))
    return response_to(error)


async def _no_route(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    reason = http.HTTPStatus(error.status_code).phrase
    message = (
        f"{request.method} {request.url.path}: {reason}. Of the Tinker protocol Motet serves sampling: "
        "create_session, create_sampling_session, asample, retrieve_future and cancel_future"
    )
    return JSONResponse({"detail": message[:1000]}, status_code=error.status_code)
