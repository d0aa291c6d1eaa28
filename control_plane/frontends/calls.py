"""Runs the RPCs that come from front ends, through the interceptor and the handlers of the clients' port."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
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
        self._handlers: list[Any] = []

    def add(self, handlers: Sequence[Any]) -> None:
        """Offer the methods of these generic handlers."""
        self._handlers.extend(handlers)

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
        found = (handler.service(details) for handler in self._handlers)
        return next((handler for handler in found if handler is not None), None)
