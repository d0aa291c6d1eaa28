"""Runs the RPCs that come from front ends, through the interceptor and the handlers of the clients' port."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import grpc
import grpc.aio

from control_plane.api.rpc.frames import Status
from control_plane.api.rpc.interceptor import RpcInterceptor
from control_plane.api.rpc.remote_context import RemoteContext

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Details:
    """grpc.HandlerCallDetails."""

    method: str
    invocation_metadata: Any


class OfferedMethods:
    """What the port offers."""

    def __init__(self, interceptor: RpcInterceptor) -> None:
        self._interceptor = interceptor
        self._handlers: dict[str, Any] = {}  # by path

    @property
    def paths(self) -> tuple[str, ...]:
        """ "/package.Service/Method" of each."""
        return tuple(self._handlers)

    def add(self, service: str, handlers: Mapping[str, Any]) -> None:
        """Offer the methods of a service."""
        self._handlers.update({f"/{service}/{name}": handler for name, handler in handlers.items()})

    async def run(self, context: RemoteContext) -> None:
        """Handle one RPC from its beginning to its status."""
        status = Status(grpc.StatusCode.OK.value[0])
        try:
            details: Any = _Details(context.method, context.invocation_metadata())
            handler: Any = await self._interceptor.intercept_service(self._handler_of, details)
            if handler is None:
                status = Status(grpc.StatusCode.UNIMPLEMENTED.value[0], "Method not found!")
                return
            context.use(handler.request_deserializer, handler.response_serializer)
            await handler.stream_stream(context.requests(), context)
        except grpc.aio.AbortError:
            pass  # it has sent its status
        except asyncio.CancelledError:
            status = Status(grpc.StatusCode.CANCELLED.value[0], "the server cancelled the call")
            raise
        except Exception:  # the interceptor maps every error that it knows
            logger.exception("call not handled method=%s", context.method)
            status = Status(grpc.StatusCode.UNKNOWN.value[0], "the server failed")
        finally:
            context.end(status)

    async def _handler_of(self, details: Any) -> Any:
        return self._handlers.get(details.method)
