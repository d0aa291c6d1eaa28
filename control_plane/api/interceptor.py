"""The outermost interceptor of both ports: whatever a handler does, the client gets a defined status.

Parses unary requests itself, so that malformed protobuf is INVALID_ARGUMENT; maps MotetError by the one table;
turns everything else into INTERNAL with a correlation id, the rest in the log only. A handler's generator is
closed before the RPC ends, so its `finally` runs at once. A client that does not read cannot hold a handler; time in
which this process did not run is not held against it.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import logging
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import grpc
import grpc.aio
from google.protobuf.message import DecodeError

from control_plane.api.error_status import DETAILS_KEY, internal_status, status_proto
from control_plane.awake import AwakeClock, AwakeTimeout
from control_plane.errors import FieldViolation, InvalidRequest, MotetError, SlowConsumer

logger = logging.getLogger(__name__)

Context = grpc.aio.ServicerContext[Any, Any]
Deserializer = Callable[[bytes], Any] | None
Limit = Callable[[], AwakeTimeout]  # how long a client may leave a message unread


class ErrorInterceptor(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]  # not generic at run time
    """Wraps the handlers of all four kinds of method.

    `write_timeout_s`: how long a client may leave a response unread that its flow control has no room for.
    """

    def __init__(self, *, write_timeout_s: float = 30.0, clock: Callable[[], float] = time.monotonic) -> None:
        self._write_timeout_s = write_timeout_s
        self._awake = AwakeClock(clock)

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Any, Any]]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[Any, Any]:
        """The handler with its errors mapped."""
        handler: Any = await continuation(handler_call_details)
        if handler is None:  # an unknown method; grpc answers UNIMPLEMENTED
            return handler  # type: ignore[return-value]  # the stubs forget None
        method = str(handler_call_details.method)
        make: Any
        # Cases: (streamed request, streamed response). A streamed request is parsed by grpc inside the handler.
        if not handler.request_streaming:
            parse = handler.request_deserializer
            if handler.response_streaming:
                make, inner = grpc.unary_stream_rpc_method_handler, handler.unary_stream
                outer = self._streaming(method, inner, parse)
            else:
                make, inner = grpc.unary_unary_rpc_method_handler, handler.unary_unary
                outer = self._single(method, inner, parse)
            return make(outer, None, handler.response_serializer)  # type: ignore[no-any-return]
        if handler.response_streaming:
            make, outer = grpc.stream_stream_rpc_method_handler, self._streaming(method, handler.stream_stream, None)
        else:
            make, outer = grpc.stream_unary_rpc_method_handler, self._single(method, handler.stream_unary, None)
        return make(outer, handler.request_deserializer, handler.response_serializer)  # type: ignore[no-any-return]

    def _limit(self) -> AwakeTimeout:
        return AwakeTimeout(self._write_timeout_s, self._awake)

    def _single(self, method: str, inner: Any, parse: Deserializer) -> Any:
        async def handle(request: Any, context: Context) -> Any:
            async with _mapped_errors(method, context, self._limit):
                answer = inner(request if parse is None else parse(request), context)
                return await answer if inspect.isawaitable(answer) else answer

        return handle

    def _streaming(self, method: str, inner: Any, parse: Deserializer) -> Any:
        # Always a coroutine that writes: grpc.aio leaves the generator of a cancelled RPC to the garbage collector,
        # aclosing() ends it here.
        async def handle(request: Any, context: Context) -> None:
            async with _mapped_errors(method, context, self._limit):
                answer = inner(request if parse is None else parse(request), context)
                if inspect.isawaitable(answer):
                    await answer
                    return
                async with contextlib.aclosing(answer):
                    async for message in answer:
                        try:
                            async with self._limit():
                                await context.write(message)
                        except TimeoutError as error:
                            raise SlowConsumer(
                                f"the stream was not read for {self._write_timeout_s:g} s; read faster"
                            ) from error

        return handle


@contextlib.asynccontextmanager
async def _mapped_errors(method: str, context: Context, limit: Limit) -> AsyncIterator[None]:
    try:
        yield
    except grpc.aio.AbortError:  # the handler chose its status itself
        raise
    except MotetError as error:
        if type(error) is MotetError:
            await _abort_internal(method, context, error, limit)
        status = status_proto(error)
        logger.debug("refused method=%s reason=%s message=%s", method, error.reason, status.message)
        await _abort(context, status, limit)
    except DecodeError:
        violation = FieldViolation("request", "not a valid message of this method; check the protobuf encoding")
        await _abort(context, status_proto(InvalidRequest(violation)), limit)
    except asyncio.CancelledError as error:
        task = asyncio.current_task()
        if task is not None and task.cancelling():  # the client left, its deadline passed, or the server stops
            raise
        # Left alone, a CancelledError that nobody asked for would leave the client waiting for ever.
        await _abort_internal(method, context, error, limit)
    except Exception as error:
        await _abort_internal(method, context, error, limit)


async def _abort_internal(method: str, context: Context, error: BaseException, limit: Limit) -> None:
    correlation_id = secrets.token_hex(8)
    logger.error("internal error method=%s correlation_id=%s", method, correlation_id, exc_info=error)
    await _abort(context, internal_status(correlation_id), limit)


async def _abort(context: Context, status: Any, limit: Limit) -> None:
    code = next(code for code in grpc.StatusCode if code.value[0] == status.code)
    try:
        async with limit():
            await context.abort(code, status.message, ((DETAILS_KEY, status.SerializeToString()),))
    except TimeoutError as error:
        # The status stands behind responses that the client does not read: it gets it when it does, nobody waits here.
        raise asyncio.CancelledError from error
