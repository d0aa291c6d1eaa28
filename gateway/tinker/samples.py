"""Sample requests: started by one call, waited for by others, all in the process that is their session's home."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Mapping

import msgspec
from motet import MotetError, ResourceExhausted
from motet.connection.trace import TRACEPARENT, TRACESTATE
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from gateway.http.bodies import Bodies, decoded_as, decoded_or_refused
from gateway.http.errors import Refusal, is_callers_mistake, refusal_from
from gateway.http.keys import current_key, current_owner, set_key
from gateway.http.siblings import Call, Result, Siblings
from gateway.http.upstream import Upstream
from gateway.tinker import messages
from gateway.tinker.errors import response_to
from gateway.tinker.futures import Futures, TooManySamples, UnknownSample
from gateway.tinker.sampling import check_request, sample
from gateway.tinker.sessions import source_of

logger = logging.getLogger(__name__)

POLL_S = 20.0  # a poll of a request that runs gets its response after this time; the SDK waits 45 s
_PROTOBUF = "application/x-protobuf"


class _Session(msgspec.Struct):
    """What names the session in any of the bodies."""

    sampling_session_id: str | None = None
    request_id: str | None = None


class Samples:
    """The three calls about sample requests. `serve` takes those that another process of the gateway got."""

    def __init__(
        self, upstream: Upstream, futures: Futures, bodies: Bodies, siblings: Siblings, timeout_s: float
    ) -> None:
        """`timeout_s` bounds one sample request."""
        self._upstream = upstream
        self._futures = futures
        self._bodies = bodies
        self._siblings = siblings
        self._timeout_s = timeout_s
        self._handlers: Mapping[str, Callable[[bytes], Awaitable[Response]]] = {
            "asample": self._start,
            "retrieve_future": self._retrieve,
            "cancel_future": self._cancel,
        }

    @property
    def bodies(self) -> Mapping[str, type[messages.Message]]:
        """What each of the calls takes."""
        return {
            "asample": messages.SampleRequest,
            "retrieve_future": messages.RetrieveFuture,
            "cancel_future": messages.CancelFuture,
        }

    def handler(self, action: str) -> Callable[[Request], Awaitable[Response]]:
        """Handles requests here, or hands them over to where their session is at home."""

        async def handle(request: Request) -> Response:
            body = await self._bodies.read(request)
            if (home := self._home_of(body)) is None:
                return await self._handlers[action](body)
            call = Call(action, current_key(), TRACEPARENT.get(), TRACESTATE.get(), body)
            result = await self._siblings.hand_over(home, call)
            return Response(result.body, status_code=result.status, headers=result.headers)

        return handle

    async def serve(self, call: Call) -> Result:
        """A request that another process hands over."""
        set_key(call.key)
        TRACEPARENT.set(call.traceparent)
        TRACESTATE.set(call.tracestate)
        try:
            response = await self._handlers[call.action](call.body)
        except (Refusal, MotetError) as error:
            response = response_to(error)
        return Result(response.status_code, dict(response.headers), bytes(response.body))

    def _home_of(self, body: bytes) -> int | None:
        try:
            named = decoded_as(body, _Session)
        except ValueError:
            return None  # which is refused here
        return self._siblings.home_of((named.request_id or named.sampling_session_id or "").partition(":")[0])

    async def _start(self, data: bytes) -> Response:
        body = decoded_or_refused(data, messages.SampleRequest)
        if body.sampling_session_id is None or body.seq_id is None:
            raise Refusal(400, "sampling_session_id and seq_id: are required; create a sampling session first")
        check_request(body)
        source, client = source_of(body.sampling_session_id), self._upstream.client
        request_id = f"{body.sampling_session_id}:{body.seq_id}"
        try:
            self._futures.start(request_id, current_owner(), lambda: sample(body, source, client, self._timeout_s))
        except TooManySamples:
            raise Refusal(429, "too many sample requests at present; send it again later") from None
        ids = [f"{request_id}:{index}" for index in range(body.num_samples)]
        return JSONResponse({"request_id": request_id, "sample_sequence_ids": ids})

    async def _retrieve(self, data: bytes) -> Response:
        """What became of a request.

        200 with protobuf: the samples. 200 with JSON: it failed, which the SDK raises. 408: it runs. 410: the SDK sends
        its request again, some time later.
        """
        body = decoded_or_refused(data, messages.RetrieveFuture)
        try:
            outcome = await self._futures.wait(body.request_id, current_owner(), POLL_S)
        except UnknownSample as error:
            outcome = error
        if outcome is None:
            waiting = {"type": "try_again", "request_id": body.request_id, "queue_state": "active"}
            return JSONResponse(waiting, status_code=408)
        if isinstance(outcome, bytes):
            return Response(outcome, media_type=_PROTOBUF)
        if isinstance(outcome, UnknownSample) or (
            isinstance(outcome, ResourceExhausted) and outcome.retry_after_s is not None
        ):
            return JSONResponse({"detail": f"request {body.request_id} has no result; send it again"}, status_code=410)
        if isinstance(outcome, Refusal):
            return JSONResponse({"error": outcome.message, "category": "user"})
        if isinstance(outcome, MotetError):
            category = "user" if is_callers_mistake(outcome) else "server"
            return JSONResponse({"error": refusal_from(outcome).message, "category": category})
        # Our own mistake. To a 5xx the SDK would repeat its poll at once, for ever.
        logger.error("a sample request failed request_id=%s", body.request_id, exc_info=outcome)
        return JSONResponse({"error": "an internal error of the gateway; its log has it", "category": "server"})

    async def _cancel(self, data: bytes) -> Response:
        body = decoded_or_refused(data, messages.CancelFuture)
        self._futures.cancel(body.request_id, current_owner())
        return JSONResponse({})
