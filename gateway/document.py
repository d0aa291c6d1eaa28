"""`/openapi.json`: every route of the gateway as OpenAPI 3.1, made from the routes and the types of their bodies."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from types import UnionType
from typing import Any, get_args

import msgspec
from motet import __version__
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Mount

from gateway.http.described import FORM_MEDIA, JSON, Described, Description
from gateway.openai.errors import ErrorBody
from gateway.tinker.errors import DetailBody

PATH = "/openapi.json"
_PARAMETER = re.compile(r"\{([a-z_]+)(?::[a-z]+)?\}")
_REF = "#/components/schemas/{name}"
_TINKER = "/api/v1/"


def document_route(routes: list[BaseRoute]) -> Described:
    """The route of the document about `routes` and itself."""
    data = b""

    async def document(_request: Request) -> Response:
        return Response(data, media_type=JSON)

    description = Description(summary="This document", is_open=True)
    route = Described("GET", PATH, document, description)
    data = msgspec.json.encode(document_of([*routes, route]))
    return route


def document_of(routes: Iterable[BaseRoute]) -> dict[str, Any]:
    """The document. A route that is not described is a mistake of ours."""
    described = list(_flat(routes, ""))
    types: list[Any] = [ErrorBody, DetailBody]
    for _, route in described:
        types += [*_kinds(route.description.body), *_kinds(route.description.response)]
    schemas, components = msgspec.json.schema_components(types, ref_template=_REF)
    schema_of = dict(zip(types, schemas, strict=True))
    paths: dict[str, dict[str, Any]] = {}
    for path, route in described:
        shown = _PARAMETER.sub(r"{\1}", path)
        paths.setdefault(shown, {})[route.method.lower()] = _operation(path, route, schema_of)
    return {
        "openapi": "3.1.0",
        "info": {"title": "Motet's gateway", "version": __version__},
        "paths": paths,
        "components": {
            "schemas": components,
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{"key": []}],
    }


def _kinds(given: Any) -> tuple[Any, ...]:
    """The types of a union, or the one type, or none."""
    if given is None:
        return ()
    return get_args(given) if isinstance(given, UnionType) else (given,)


def _flat(routes: Iterable[BaseRoute], prefix: str) -> Iterator[tuple[str, Described]]:
    for route in routes:
        if isinstance(route, Mount):
            yield from _flat(route.routes, prefix + route.path)
        else:
            assert isinstance(route, Described), f"{route} is not described"
            yield prefix + route.path, route


def _operation(path: str, route: Described, schema_of: dict[Any, Any]) -> dict[str, Any]:
    about = route.description
    anything = {"type": "object"}

    def shown(given: Any) -> dict[str, Any]:
        schemas = [schema_of[kind] for kind in _kinds(given)]
        return {"anyOf": schemas} if len(schemas) > 1 else (*schemas, anything)[0]

    response = shown(about.response)
    content = {media: {"schema": response if media == JSON else {"type": "string"}} for media in about.response_media}
    refused = schema_of[DetailBody if path.startswith(_TINKER) else ErrorBody]
    operation: dict[str, Any] = {
        "summary": about.summary,
        "operationId": f"{route.method.lower()}{re.sub('[^a-z0-9]+', '_', path)}",
        "responses": {
            "2XX": {"description": "It went well", "content": content},
            "default": {"description": "It was refused", "content": {JSON: {"schema": refused}}},
        },
    }
    text = {"type": "string"}
    parameters = [{"name": name, "in": "path", "required": True, "schema": text} for name in _PARAMETER.findall(path)]
    parameters += [
        {"name": name, "in": "query", "required": False, "schema": text, "description": meaning}
        for name, meaning in about.query.items()
    ]
    if parameters:
        operation["parameters"] = parameters
    if about.body is not None:
        body = {JSON: {"schema": shown(about.body)}}
        if about.form:
            form = {"type": "object", "properties": about.form, "required": list(about.form)}
            body[FORM_MEDIA] = {"schema": form}
        operation["requestBody"] = {"required": True, "content": body}
    if about.is_open:
        operation["security"] = []
    return operation
