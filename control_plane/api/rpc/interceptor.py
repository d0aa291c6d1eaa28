"""The outermost interceptor of both ports: bounds what an RPC may take, and gives it a caller and a defined status.

- The Caller of an RPC is the current one while its handler runs, whatever the kind of method.
- Each RPC holds a place in a limit that peers share. A client has limited time to send its request and to read a
  response. Time in which this process did not run does not count.
- Unary requests are read and parsed here, so that malformed protobuf is INVALID_ARGUMENT. A MotetError gets its status
  from one table. Every other error is INTERNAL with a correlation id; the log has the rest.
- A handler's generator is closed before the RPC ends, so its `finally` runs at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import logging
import random
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import grpc
import grpc.aio
from google.protobuf.message import DecodeError

from control_plane.access.principal import Principal
from control_plane.api.rpc.callers import Callers
from control_plane.api.rpc.connection_shares import BusyPeers
from control_plane.api.rpc.error_status import DETAILS_KEY, internal_status, status_proto
from control_plane.api.rpc.refusal_pace import RefusalPace
from control_plane.api.rpc.remote_context import RemoteContext
from control_plane.api.rpc.rpc_limits import RpcLimits
from control_plane.awake import AwakeClock, AwakeTimeout
from control_plane.caller import Caller, acting_as
from control_plane.errors import (
    DeadlineExceeded,
    FieldViolation,
    InvalidRequest,
    MotetError,
    SlowConsumer,
    Unavailable,
    correlation_id_of,
)

logger = logging.getLogger(__name__)

REQUEST_TIMEOUT_S = 30.0
TIMEOUT_SPREAD = 2.0  # the longest time that a client is given for its request, in times of the shortest
WRITE_TIMEOUT_S = 30.0

Limit = Callable[[], AwakeTimeout]  # how long a client may leave a message unread
Context = grpc.aio.ServicerContext[Any, Any]
Identify = Callable[[str, Context], Caller]  # by the method's path
OnRefused = Callable[[str, Caller, MotetError], None]  # by the method's path
Guard = Callable[[Context], contextlib.AbstractContextManager[None]]  # around the handling of one call
_EOF = grpc.aio.EOF  # type: ignore[attr-defined]  # the stubs lack it


class RpcInterceptor(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]  # not generic at run time
    """Wraps the handlers of all four kinds of method.

    `limits`: how many RPCs run at once.
    `write_timeout_s`: how long a client may leave a response unread that its flow control has no room for.
    `request_timeout_s`: how long the request of an RPC may take to arrive after its headers. Each call gets 1 to
    TIMEOUT_SPREAD times that, by `rng`: thousands of idle calls that began together would otherwise end together, and
    delay all others. A stream of requests has the time limits of its handler.
    `identify`: who makes a call. It is called before any message is read; what it raises refuses the call. By default
    everybody may do everything.
    `guard`: entered before that. It may refuse the call, or end it later: it cancels the call's task, and raises an
    error on the way out.
    `on_refused`: called with every MotetError that ends a call.
    `pace`: when a call that was refused before it had a caller may end.
    `busy`: learns which peers have calls of callers that the server knows.
    """

    def __init__(
        self,
        limits: RpcLimits,
        *,
        write_timeout_s: float = WRITE_TIMEOUT_S,
        request_timeout_s: float = REQUEST_TIMEOUT_S,
        clock: Callable[[], float] = time.monotonic,
        identify: Identify | None = None,
        guard: Guard | None = None,
        on_refused: OnRefused | None = None,
        rng: random.Random | None = None,
        pace: RefusalPace | None = None,
        busy: BusyPeers | None = None,
    ) -> None:
        self._busy = busy or BusyPeers()
        self._limits = limits
        self._pace = pace or RefusalPace()
        self._rng = rng or random.Random(0)
        self._on_refused = on_refused
        self._guard = guard or _no_guard
        self._identify = identify or Callers()
        self._write_timeout_s = write_timeout_s
        self._request_timeout_s = request_timeout_s
        self._awake = AwakeClock(clock)

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Any, Any]]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[Any, Any]:
        """The bounded handler with its errors mapped."""
        handler: Any = await continuation(handler_call_details)
        if handler is None:  # an unknown method; grpc ends it with UNIMPLEMENTED
            return handler  # type: ignore[return-value]  # the stubs forget None
        # Always a stream of both: grpc reads the message of a unary request before it calls the handler, for as long as
        # the client likes. And always a coroutine that writes: grpc leaves the generator of a cancelled RPC to the
        # garbage collector.
        make: Any = grpc.stream_stream_rpc_method_handler
        parse = handler.request_deserializer if handler.request_streaming else None
        bounded = self._bounded(str(handler_call_details.method), handler)
        return make(bounded, parse, handler.response_serializer)  # type: ignore[no-any-return]

    def _write_limit(self) -> AwakeTimeout:
        return AwakeTimeout(self._write_timeout_s, self._awake)

    def _bounded(self, method: str, handler: Any) -> Any:
        inner = handler.unary_unary or handler.unary_stream or handler.stream_unary or handler.stream_stream

        async def handle(requests: Any, context: Context) -> None:
            caller: Caller | None = None
            with contextlib.ExitStack() as held:
                async with _mapped_errors(method, context, self._write_limit):
                    try:
                        with self._guard(context):
                            caller = self._identify(method, context)
                            held.enter_context(self._limits.of(method, caller.principal).place(caller.holder))
                            if not caller.principal.is_stranger:
                                held.enter_context(self._busy.busy(caller.peer))
                            held.enter_context(acting_as(caller))
                            if handler.request_streaming:
                                result = inner(requests, context)
                            else:
                                raw = await self._request(method, caller, context)
                                held.enter_context(self._limits.content(caller.holder, len(raw)))
                                parse = handler.request_deserializer
                                result = inner(raw if parse is None else parse(raw), context)
                            await self._respond(result, context, is_stream=handler.response_streaming)
                    except MotetError as error:
                        if self._on_refused is not None:
                            self._on_refused(method, _refused_caller(caller, error, context), error)
                        if caller is None and not isinstance(error, Unavailable):
                            await self._pace.wait(context.peer())
                        raise

        return handle

    async def _request(self, method: str, caller: Caller, context: Context) -> bytes:
        limit_s = self._request_timeout_s * self._rng.uniform(1, TIMEOUT_SPREAD)
        try:
            async with AwakeTimeout(limit_s, self._awake), self._limits.arriving(method).place(caller.holder):
                raw: Any = await context.read()
        except TimeoutError as error:
            raise DeadlineExceeded(
                f"the request did not arrive within {self._request_timeout_s:g} s of its headers; send it at once"
            ) from error
        if raw is _EOF:
            raise InvalidRequest(FieldViolation("request", "missing; the call ended without a message"))
        return raw  # type: ignore[no-any-return]

    async def _respond(self, result: Any, context: Context, *, is_stream: bool) -> None:
        # Cases: 1. a generator of responses; 2. a coroutine that writes its responses itself; 3. one response.
        if is_stream and not inspect.isawaitable(result):
            async with contextlib.aclosing(result):
                async for message in result:
                    await self._write(message, context)
        elif is_stream:
            await result
        else:
            await self._write(await result if inspect.isawaitable(result) else result, context)

    async def _write(self, message: Any, context: Context) -> None:
        remote: object = context
        if isinstance(remote, RemoteContext) and remote.write_at_once(message):
            return
        try:
            async with self._write_limit():
                await context.write(message)
        except TimeoutError as error:
            raise SlowConsumer(f"the stream was not read for {self._write_timeout_s:g} s; read faster") from error


def _no_guard(_context: Context) -> contextlib.AbstractContextManager[None]:
    return contextlib.nullcontext()


def _refused_caller(caller: Caller | None, error: MotetError, context: Context) -> Caller:
    """Whoever makes a call that was refused, also if it was refused before it had a caller.

    A worker is known by its certificate only: callers of its port are anybody.
    """
    known = error.refused_principal
    if caller is not None and (caller.principal.is_authenticated or known is None):
        return caller
    principal = known if isinstance(known, Principal) else Principal()
    return Caller(
        tenant=principal.default_tenant if principal.tenants else "", principal=principal, peer=context.peer()
    )


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
        # Left alone, a CancelledError that is not a cancellation of this task would leave the client waiting for ever.
        await _abort_internal(method, context, error, limit)
    except grpc.aio.InternalError as error:
        if context.done():  # the handler's own status could not be sent: the connection is gone
            raise asyncio.CancelledError from error
        await _abort_internal(method, context, error, limit)
    except Exception as error:
        await _abort_internal(method, context, error, limit)


async def _abort_internal(method: str, context: Context, error: BaseException, limit: Limit) -> None:
    correlation_id = correlation_id_of(error)
    logger.error("internal error method=%s correlation_id=%s", method, correlation_id, exc_info=error)
    await _abort(context, internal_status(correlation_id), limit)


async def _abort(context: Context, status: Any, limit: Limit) -> None:
    code = next(code for code in grpc.StatusCode if code.value[0] == status.code)
    try:
        async with limit():
            await context.abort(code, status.message, ((DETAILS_KEY, status.SerializeToString()),))
    except TimeoutError as error:
        # The status is queued behind responses that the client has not read. The client gets it when it reads; this
        # handler does not wait.
        raise asyncio.CancelledError from error
    except grpc.aio.InternalError as error:  # the connection is gone
        raise asyncio.CancelledError from error
