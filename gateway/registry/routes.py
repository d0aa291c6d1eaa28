"""Routes of the adapter registry. Each makes one call of the SDK with the caller's key: Motet judges roles."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import msgspec
from motet import Adapter, AdapterCanary, InvalidArgument, MotetError, NotFound, VersionRollout, calls
from motet.adapters import rollouts
from motet.adapters.downloads import download_progress
from motet.uploads import upload_state
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from contract.ids import ADAPTER_ID_FORM, is_adapter_id
from gateway.http.bodies import Bodies
from gateway.http.described import JSON, Described, Description
from gateway.http.errors import Refusal
from gateway.http.upstream import Upstream
from gateway.openai.errors import error_body, problem_of, refused
from gateway.openai.handlers import decoded
from gateway.registry import messages
from gateway.registry.errors import of_upload, registry_refusal
from gateway.registry.settings import RegistrySettings
from gateway.registry.uploads import FORM, Uploads, probe_id

PAGE_SIZE = 100
MAX_PAGE_SIZE = 1000
_ADAPTERS, _ADAPTER = "/v1/adapters", "/v1/adapters/{name}"
_ETAG = {"etag": "only if the adapter still has this etag"}
_PAGES = {
    "page_size": f"items of a page, 1 to {MAX_PAGE_SIZE}, default {PAGE_SIZE}",
    "page_token": "next_page_token of the page before",
}
_UPLOAD = Description(
    summary="Register an adapter or a version: an upload, or as JSON a place that the operator listed",
    body=messages.FromRoot,
    form=FORM,
    response=Adapter | messages.Operation,
)
Handler = Callable[[Request], Awaitable[Any]]


def _of(summary: str, response: Any, body: Any = None, query: Mapping[str, str] | None = None) -> Description:
    return Description(summary=summary, body=body, response=response, query=query or {})


# Method, path, the handler's name, what is to be known.
_ROUTES: tuple[tuple[str, str, str, Description], ...] = (
    ("GET", _ADAPTERS, "list", _of("A page of adapters", messages.AdapterPage, query=_PAGES)),
    ("POST", _ADAPTERS, "register", _UPLOAD),
    ("GET", _ADAPTER, "get", _of("One adapter", Adapter)),
    ("PATCH", _ADAPTER, "update", _of("Change an adapter", Adapter, messages.Change)),
    ("DELETE", _ADAPTER, "delete", _of("Delete an adapter", messages.Operation, query=_ETAG)),
    ("GET", f"{_ADAPTER}/versions", "versions", _of("A page of versions", messages.VersionPage, query=_PAGES)),
    (
        "DELETE",
        f"{_ADAPTER}/versions/{{digest}}",
        "delete_version",
        _of("Delete a version that is not the active one", messages.Operation, query=_ETAG),
    ),
    (
        "PUT",
        f"{_ADAPTER}/labels/{{label}}",
        "set_label",
        _of("Let a label point to a version", Adapter, messages.Version),
    ),
    ("DELETE", f"{_ADAPTER}/labels/{{label}}", "remove_label", _of("Remove a label", Adapter)),
    (
        "POST",
        f"{_ADAPTER}/activate",
        "activate",
        _of("Make a version the active one", Adapter, messages.Activation),
    ),
    (
        "POST",
        f"{_ADAPTER}/rollback",
        "roll_back",
        _of("Make the version active that was active before", Adapter, messages.Rollback),
    ),
    (
        "PUT",
        f"{_ADAPTER}/canary",
        "set_canary",
        _of("Give a version a share of the new requests", Adapter, messages.Canary),
    ),
    ("DELETE", f"{_ADAPTER}/canary", "remove_canary", _of("End the canary", Adapter, query=_ETAG)),
    ("POST", f"{_ADAPTER}/pin", "pin", _of("Load an adapter and keep it loaded", Adapter)),
    ("POST", f"{_ADAPTER}/unpin", "unpin", _of("Take the pin back", Adapter)),
    ("POST", f"{_ADAPTER}/load", "load", _of("Bring a version into memory", messages.Residencies, messages.Place)),
    (
        "POST",
        f"{_ADAPTER}/unload",
        "unload",
        _of("Take a version out of memory", messages.Residencies, messages.Place),
    ),
    ("GET", "/v1/operations/{operation}", "operation", _of("Work that goes on", messages.Operation)),
)


def registry_routes(
    upstream: Upstream, bodies: Bodies, settings: RegistrySettings, timeout_s: float
) -> list[Described]:
    """The routes, with their whole paths. `timeout_s` bounds the registration of an upload."""
    api = _Registry(upstream, bodies, settings, timeout_s)
    return [
        Described(method, path, _responding(getattr(api, handler), description.query), description)
        for method, path, handler, description in _ROUTES
    ]


class _Registry:
    """The handlers. Each returns what becomes JSON."""

    def __init__(self, upstream: Upstream, bodies: Bodies, settings: RegistrySettings, timeout_s: float) -> None:
        self._upstream = upstream
        self._bodies = bodies
        self._uploads = Uploads(settings, self._check_may_upload)
        self._timeout_s = timeout_s

    async def register(self, request: Request) -> Adapter | messages.Operation:
        """An upload, or JSON."""
        media = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        return await (self._register_from_root(request) if media == JSON else self._register_upload(request))

    async def list(self, request: Request) -> messages.AdapterPage:
        page = await self._upstream.client.send(calls.list_adapters(*_page_of(request)))
        return messages.AdapterPage(page.items, page.next_page_token)

    async def versions(self, request: Request) -> messages.VersionPage:
        page = await self._upstream.client.send(calls.list_versions(_name_of(request), *_page_of(request)))
        return messages.VersionPage(page.items, page.next_page_token)

    async def get(self, request: Request) -> Adapter:
        return await self._upstream.client.adapters.get(_name_of(request))

    async def update(self, request: Request) -> Adapter:
        body = await decoded(self._bodies, request, messages.Change)
        return await self._upstream.client.adapters.update(_name_of(request), **msgspec.structs.asdict(body))

    async def delete(self, request: Request) -> messages.Operation:
        call = calls.delete_adapter(_name_of(request), request.query_params.get("etag", ""))
        return _operation(await self._upstream.client.send(call))

    async def delete_version(self, request: Request) -> messages.Operation:
        digest, etag = request.path_params["digest"], request.query_params.get("etag", "")
        return _operation(await self._upstream.client.send(calls.delete_version(_name_of(request), digest, etag)))

    async def set_label(self, request: Request) -> Adapter:
        body = await decoded(self._bodies, request, messages.Version)
        adapters = self._upstream.client.adapters
        return await adapters.set_label(_name_of(request), request.path_params["label"], body.digest)

    async def remove_label(self, request: Request) -> Adapter:
        return await self._upstream.client.adapters.set_label(_name_of(request), request.path_params["label"], None)

    async def activate(self, request: Request) -> Adapter:
        body = await decoded(self._bodies, request, messages.Activation)
        return await self._upstream.client.adapters.activate(_name_of(request), **msgspec.structs.asdict(body))

    async def roll_back(self, request: Request) -> Adapter:
        body = await decoded(self._bodies, request, messages.Rollback)
        return await self._upstream.client.adapters.roll_back(_name_of(request), **msgspec.structs.asdict(body))

    async def set_canary(self, request: Request) -> Adapter:
        body = await decoded(self._bodies, request, messages.Canary)
        canary = AdapterCanary(body.digest, body.per_mille)
        return await self._upstream.client.adapters.set_canary(_name_of(request), canary, etag=body.etag)

    async def remove_canary(self, request: Request) -> Adapter:
        etag = request.query_params.get("etag", "")
        return await self._upstream.client.send(rollouts.set_canary(_name_of(request), None, etag))

    async def pin(self, request: Request) -> Adapter:
        return await self._upstream.client.adapters.pin(_name_of(request))

    async def unpin(self, request: Request) -> Adapter:
        return await self._upstream.client.adapters.unpin(_name_of(request))

    async def load(self, request: Request) -> messages.Residencies:
        body = await decoded(self._bodies, request, messages.Place)
        found = await self._upstream.client.adapters.load(_name_of(request), **msgspec.structs.asdict(body))
        return messages.Residencies(list(found))

    async def unload(self, request: Request) -> messages.Residencies:
        body = await decoded(self._bodies, request, messages.Place)
        found = await self._upstream.client.adapters.unload(_name_of(request), **msgspec.structs.asdict(body))
        return messages.Residencies(list(found))

    async def operation(self, request: Request) -> messages.Operation:
        name = f"operations/{request.path_params['operation']}"
        return _operation(await self._upstream.client.send(calls.get_operation(name)))

    async def _register_upload(self, request: Request) -> Adapter:
        async with self._uploads.receive(request) as (settings, directory):
            try:
                body = msgspec.json.decode(settings, type=messages.Settings)
            except (ValueError, RecursionError) as error:
                raise refused("settings", f"is not valid: {error}") from error
            try:
                return await self._upstream.client.adapters.register(
                    body.name, directory, **_registration(body), timeout_s=self._timeout_s
                )
            except InvalidArgument as error:
                raise of_upload(error, directory) from error

    async def _register_from_root(self, request: Request) -> messages.Operation:
        body = await decoded(self._bodies, request, messages.FromRoot)
        call = calls.create_adapter(body.name, body.source, **_registration(body))
        return _operation(await self._upstream.client.send(call))

    async def _check_may_upload(self) -> None:
        """Raise what Motet refuses an upload of this caller with, before anything of it is received."""
        try:
            await self._upstream.client.send(upload_state(probe_id()))
        except NotFound:
            return


def _registration(body: messages.Settings) -> dict[str, Any]:
    rollout = None if body.rollout is None else VersionRollout(**msgspec.structs.asdict(body.rollout))
    return {
        "display_name": body.display_name,
        "labels": body.labels,
        "visibility": body.visibility,
        "shared_with": body.shared_with,
        "owner": body.owner,
        "rollout": rollout,
        "validate_only": body.validate_only,
    }


def _name_of(request: Request) -> str:
    """The adapter of the path. Loads may name a version, as "NAME@NUMBER" or "NAME@LABEL"."""
    name: str = request.path_params["name"]
    if not is_adapter_id(name.partition("@")[0]):
        raise refused("name", f"{name[:100]!r} is not the id of an adapter: {ADAPTER_ID_FORM}")
    return name


def _page_of(request: Request) -> tuple[int, str]:
    size = request.query_params.get("page_size", str(PAGE_SIZE))
    if not (size.isascii() and size.isdecimal() and len(size) <= 4 and 1 <= int(size) <= MAX_PAGE_SIZE):
        raise refused("page_size", f"is {size[:20]!r}; give 1 to {MAX_PAGE_SIZE}")
    return int(size), request.query_params.get("page_token", "")


def _operation(operation: Any) -> messages.Operation:
    shown = messages.Operation(operation.name, operation.done)

    def downloaded(num_bytes: int, in_all: int) -> None:
        shown.bytes_done, shown.bytes_total = num_bytes, in_all

    download_progress(downloaded)(operation)
    try:
        calls.check_operation(operation)
    except MotetError as error:
        shown.error = problem_of(registry_refusal(error))
        return shown
    if operation.done and operation.response.type_url.endswith("/motet.v1.Adapter"):
        shown.adapter = calls.adapter_of_operation(operation)
    return shown


def _responding(handler: Handler, query: Mapping[str, str]) -> Callable[[Request], Awaitable[Response]]:
    """The handler, whose result becomes JSON, and whose refusals have the fields of the registry.

    `query`: the parameters that it reads. Others are refused.
    """

    async def respond(request: Request) -> Response:
        try:
            for name in request.query_params:
                if name not in query:
                    known = f"give {' or '.join(query)}" if query else "this route has none"
                    raise refused(name[:64], f"is not a parameter of this route; {known}")
            content = await handler(request)
        except (Refusal, MotetError) as error:
            refusal = registry_refusal(error)
            return JSONResponse(error_body(refusal), status_code=refusal.status, headers=dict(refusal.headers))
        data = msgspec.json.encode(content, enc_hook=dict)  # what msgspec does not know is a read-only mapping
        goes_on = isinstance(content, messages.Operation) and not content.done
        return Response(data, status_code=202 if goes_on else 200, media_type=JSON)

    return respond
