"""The gRPC server of every port: whatever a call's headers say, the call ends nothing but itself.

grpc.aio reads the name of the method of each call in the loop that takes up all calls. A name that is not UTF-8 raised
there, and closed the port for good, before any credential was looked at (grpcio 1.85.1). Here every method is
registered, so that gRPC's core compares names as bytes, and a call of any other method is refused without a look at
its name. Each method has a task of its own that takes up its calls: the loop of grpc.aio waits for all of its tasks
anew with every call, and with 31 methods that took a third of the time of refusing one.

This needs names of grpcio that are not public. A version that lacks them serves with its own loop, and the log says so.
"""

from __future__ import annotations

import asyncio
import importlib
import inspect
import logging
from collections.abc import Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import grpc
import grpc.aio
from google.protobuf import descriptor_pool

from control_plane.api.rpc.connection_shares import ConnectionShares

logger = logging.getLogger(__name__)
cygrpc: Any = importlib.import_module("grpc._cython.cygrpc")  # it has no stubs

_HANDLE_RPC = ["method_name", "method_resolver", "interceptors", "rpc_state", "loop", "concurrency_exceeded"]
_SCHEDULE = ["rpc_coro", "rpc_state", "loop", "method_name"]
_METHODS_OF_SERVER = ("_make_request_call_future", "_request_call", "_request_registered_call")


def rpc_server(
    *,
    interceptors: Sequence[grpc.aio.ServerInterceptor[Any, Any]] = (),
    options: Sequence[tuple[str, Any]] = (),
    connections: ConnectionShares | None = None,
) -> RpcServer:
    """A server without methods and ports, for add_registered_method_handlers; call it in the event loop.

    `connections`: looks after those of its ports while it runs.
    """
    if not has_needed_names():
        logger.error(
            "this version of grpcio is not known version=%s: a call whose method is not UTF-8 may close the port; use "
            "the version of constraints.txt",
            grpc.__version__,
        )
        plain: Any = grpc.aio.server(interceptors=list(interceptors), options=list(options))
        return plain  # type: ignore[no-any-return]  # it has the same methods; the stubs lack one of them
    return RpcServer(interceptors, options, connections)


def offer(server: Any, service_name: str, method_handlers: dict[str, grpc.RpcMethodHandler[Any, Any]]) -> None:
    """Offer the methods of a service as stubs do: a server without registered methods gets them as generic ones."""
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service_name, method_handlers),))
    server.add_registered_method_handlers(service_name, method_handlers)


def methods_of(handler: Any) -> dict[str, Any]:
    """The handlers of a service by the names of its methods, from the generic handler of a stub.

    Older stubs have nothing else. A service that is not described to protobuf has none here.
    """
    try:
        service = descriptor_pool.Default().FindServiceByName(handler.service_name())
    except (AttributeError, KeyError):
        return {}
    names = [method.name for method in service.methods]
    found = {name: handler.service(_Details(f"/{service.full_name}/{name}")) for name in names}
    return {name: one for name, one in found.items() if one is not None}


@dataclass(frozen=True, slots=True)
class _Details:
    """grpc.HandlerCallDetails."""

    method: str
    invocation_metadata: tuple[tuple[str, str], ...] = ()


def has_needed_names() -> bool:
    """Whether this version of grpcio has what RpcServer needs."""
    functions = (("_handle_rpc", _HANDLE_RPC), ("_schedule_rpc_coro", _SCHEDULE))
    return all(hasattr(cygrpc.AioServer, name) for name in _METHODS_OF_SERVER) and all(
        hasattr(cygrpc, name) and list(inspect.signature(getattr(cygrpc, name)).parameters) == parameters
        for name, parameters in functions
    )


class RpcServer(grpc.aio.Server):
    """Serves registered methods; used as a server of grpc.aio is."""

    def __init__(
        self,
        interceptors: Sequence[grpc.aio.ServerInterceptor[Any, Any]],
        options: Sequence[tuple[str, Any]],
        connections: ConnectionShares | None = None,
    ) -> None:
        self._connections = connections
        self._port = 0
        self._core = _Core(asyncio.get_running_loop(), tuple(interceptors), tuple(options))

    def add_generic_rpc_handlers(self, handlers: Iterable[grpc.GenericRpcHandler[Any, Any]]) -> None:
        """Offer the methods that `methods_of` finds; newer stubs register them, too."""
        for handler in handlers:
            if methods := methods_of(handler):
                self.add_registered_method_handlers(handler.service_name(), methods)  # type: ignore[attr-defined]

    def add_registered_method_handlers(
        self, service_name: str, method_handlers: Mapping[str, grpc.RpcMethodHandler[Any, Any]]
    ) -> None:
        """Offer the methods of a service."""
        paths = {f"/{service_name}/{name}": handler for name, handler in method_handlers.items()}
        self._core.add_registered_method_handlers(paths)

    def add_insecure_port(self, address: str) -> int:
        """Raises RuntimeError if the address cannot be listened on."""
        return self._bound(address, self._core.add_insecure_port(address.encode()))

    def add_secure_port(self, address: str, server_credentials: grpc.ServerCredentials) -> int:
        """Raises RuntimeError if the address cannot be listened on."""
        return self._bound(address, self._core.add_secure_port(address.encode(), server_credentials))

    async def start(self) -> None:
        await self._core.start()
        if self._connections is not None:
            self._connections.start(self._port)

    async def stop(self, grace: float | None = None) -> None:
        """End the server; calls that run get `grace` seconds. Idempotent."""
        if self._connections is not None:
            await self._connections.close()
        await self._core.shutdown(grace)

    def _bound(self, address: str, port: int) -> int:
        if not port:
            raise RuntimeError(f"{address} cannot be listened on")
        self._port = port
        return port

    async def wait_for_termination(self, timeout: float | None = None) -> bool:
        return bool(await self._core.wait_for_termination(timeout))


class _Core(cygrpc.AioServer):  # type: ignore[misc]  # it has no stubs
    """Takes up the calls; everything else is grpc.aio's."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        interceptors: tuple[grpc.aio.ServerInterceptor[Any, Any], ...],
        options: tuple[tuple[str, Any], ...],
    ) -> None:
        super().__init__(loop, None, (), interceptors, options, None)
        self._event_loop = loop
        self._taken_by = interceptors
        self._handlers: dict[str, Any] = {}
        self._running: set[asyncio.Task[None]] = set()  # the event loop itself keeps no task alive

    def add_registered_method_handlers(self, handlers: Mapping[str, Any]) -> None:
        unknown = {path: handler for path, handler in handlers.items() if path not in self._handlers}
        self._handlers.update(handlers)
        super().add_registered_method_handlers(unknown)

    def _make_request_call_future(self, method: bytes | None) -> asyncio.Task[None]:
        """What the loop of grpc.aio waits for: it ends with the server, by an exception, and never with a call."""
        return self._event_loop.create_task(self._take_up(method))

    async def _take_up(self, method: bytes | None) -> None:
        """Run the calls of one method, or refuse those of no registered method (None)."""
        resolver = cygrpc._MethodResolver([], self._handlers if method is not None else {})
        name = "" if method is None else method.decode()
        interceptors = () if method is None else self._taken_by
        while True:
            state = await (self._request_call() if method is None else self._request_registered_call(method))
            handling = cygrpc._handle_rpc(name, resolver, interceptors, state, self._event_loop, False)
            self._run(cygrpc._schedule_rpc_coro(handling, state, self._event_loop, name))

    def _run(self, call: Coroutine[Any, Any, None]) -> None:
        task = self._event_loop.create_task(call)
        self._running.add(task)
        task.add_done_callback(self._running.discard)
