"""What the gateway counts of its requests, for Prometheus. Labels are bounded: routes as they are written, statuses."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.multiprocess import MultiProcessCollector
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Match, Mount, Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from gateway.http.described import Described, Description
from gateway.http.siblings import Place

NO_ROUTE = "none"
_BUCKETS = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 60, 300, 1800)


class Metrics:
    """Counts requests of an application. `routes` are all that it has, with those of its mounts.

    What is shown is of all processes of the gateway. What a process counted stays when it ends, other than what it had
    open.
    """

    def __init__(self, place: Place, clock: Callable[[], float] = time.monotonic) -> None:
        """The processes' files are used if prometheus_client has been set up for them (`processes/child.py`)."""
        self._clock = clock
        self._place = place
        self._registry = registry = CollectorRegistry()
        self._requests = Counter(
            "motet_gateway_requests", "Requests that ended.", ["route", "method", "status"], registry=registry
        )
        self._streams = _gauge("motet_gateway_streams_open", "Event streams under way.", registry)
        self._open = _gauge("motet_gateway_requests_open", "Requests under way, streams included.", registry)
        _gauge("motet_gateway_processes", "Processes that serve the port.", registry).set(1)
        self._first_byte = Histogram(
            "motet_gateway_time_to_first_byte_seconds",
            "From the request to the first byte of its response's body.",
            ["route"],
            registry=registry,
            buckets=_BUCKETS,
        )
        self._duration = Histogram(
            "motet_gateway_request_duration_seconds",
            "From the request to the end of its response.",
            ["route"],
            registry=registry,
            buckets=_BUCKETS,
        )

    def route(self) -> Described:
        """`/metrics`. It needs no key."""

        async def metrics(_request: Request) -> Response:
            registry = self._registry
            if self._place.count > 1:
                registry = CollectorRegistry()
                MultiProcessCollector(registry, str(self._place.metrics_dir))  # type: ignore[no-untyped-call]
            return Response(generate_latest(registry), headers={"content-type": CONTENT_TYPE_LATEST})

        about = Description(summary="Metrics for Prometheus", response_media=("text/plain",), is_open=True)
        return Described("GET", "/metrics", metrics, about)

    def counted(self, app: ASGIApp, routes: Iterable[BaseRoute]) -> ASGIApp:
        """`app`, whose requests are counted by the route of `routes` that they match."""
        named = list(_named(routes, ""))
        plain = {name for name, _ in named if "{" not in name}
        patterns = [(name, route) for name, route in named if "{" in name]

        def name_of(scope: Scope) -> str:
            path = scope["path"]
            if path in plain:
                return str(path)
            for name, route in patterns:
                if route.matches(scope)[0] is not Match.NONE:
                    return name
            return NO_ROUTE

        async def count(scope: Scope, receive: Receive, send: Send) -> None:
            if scope["type"] != "http":
                await app(scope, receive, send)
                return
            await self._count(app, name_of(scope), scope, receive, send)

        return count

    async def _count(self, app: ASGIApp, route: str, scope: Scope, receive: Receive, send: Send) -> None:
        begun_s = self._clock()
        status, is_stream, has_body = 500, False, False

        async def watch(message: Message) -> None:
            nonlocal status, is_stream, has_body
            if message["type"] == "http.response.start":
                status = message["status"]
                if any(name == b"content-type" and b"event-stream" in value for name, value in message["headers"]):
                    is_stream = True
                    self._streams.inc()
            elif not has_body:
                has_body = True
                self._first_byte.labels(route).observe(self._clock() - begun_s)
            await send(message)

        self._open.inc()
        try:
            await app(scope, receive, watch)
        finally:
            self._open.dec()
            if is_stream:
                self._streams.dec()
            method = scope["method"] if scope["method"] in _METHODS else "other"
            self._requests.labels(route, method, str(status)).inc()
            self._duration.labels(route).observe(self._clock() - begun_s)


def _gauge(name: str, help: str, registry: CollectorRegistry) -> Gauge:
    """One that is the sum over the processes that run."""
    return Gauge(name, help, registry=registry, multiprocess_mode="livesum")


_METHODS = frozenset(("GET", "POST", "PUT", "PATCH", "DELETE", "HEAD", "OPTIONS"))


def _named(routes: Iterable[BaseRoute], prefix: str) -> Iterable[tuple[str, BaseRoute]]:
    """Each route by its whole path; one of a mount stands with a mount of its own."""
    for route in routes:
        if isinstance(route, Mount):
            for name, inner in _named(route.routes, prefix + route.path):
                yield name, Mount(route.path, routes=[inner])
        elif isinstance(route, Route):
            yield prefix + route.path, route
