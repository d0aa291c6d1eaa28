"""One Attach stream as the worker has it: a reader thread fills the inbox, and what is to be sent goes to an outbox.

The plan client makes one for each session; the session's watch looks at when the control plane was last heard, and at
when the stream ended.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Protocol

import grpc

from contract.v1 import plan_pb2

logger = logging.getLogger(__name__)

# How gRPC's text begins if no server accepts the connection.
_UNREACHABLE = "failed to connect to all addresses"


@dataclass(frozen=True, slots=True)
class Ended:
    """The stream is over: the last thing in an inbox."""

    reason: str
    code: grpc.StatusCode | None = None
    is_unreachable: bool = False  # no server accepted the connection


@dataclass(frozen=True, slots=True)
class Leave:
    """In the inbox: the worker must end the session and attach again."""

    reason: str


class Stop:
    """In the inbox: the process must end."""


class Failed:
    """In the inbox: a step that was submitted has no results."""


InboxItem = plan_pb2.AttachResponse | Ended | Leave | Stop | Failed


class OpenCall(Protocol):
    """Begins an Attach call that sends these messages."""

    def __call__(self, requests: Iterator[plan_pb2.AttachRequest], /) -> grpc.CallIterator[plan_pb2.AttachResponse]: ...


class PlanStream:
    """Both directions of one call. `read` is to run on a thread of its own; everything else is thread-safe."""

    def __init__(
        self,
        open_call: OpenCall,
        address: str,
        inbox: SimpleQueue[InboxItem],
        clock: Callable[[], float],
        explain: Callable[[str], str | None] = lambda _details: None,
    ) -> None:
        """`explain`: gRPC's text for a connection that failed, in plain words; None if it has none."""
        self.inbox = inbox
        self.heard_s = clock()  # when the control plane was last heard
        self.ended: Ended | None = None  # set before it is in the inbox
        self._address = address  # of the control plane, for people
        self._clock = clock
        self._explain = explain
        self._outbox: SimpleQueue[plan_pb2.AttachRequest | None] = SimpleQueue()
        self._call = open_call(iter(self._outbox.get, None))

    def send(self, message: plan_pb2.AttachRequest) -> None:
        """Queue a message; nothing leaves after `close_outbox`."""
        self._outbox.put(message)

    def close_outbox(self) -> None:
        """End the worker's side once everything before it has left."""
        self._outbox.put(None)

    def cancel(self) -> None:
        """End both sides at once; what is in the outbox may be lost."""
        self._call.cancel()  # type: ignore[no-untyped-call]  # the stubs lack the type

    def read(self) -> None:
        """Put messages into the inbox until the call ends. A pong is sent from here, ahead of plans in the inbox."""
        try:
            for message in self._call:
                self.heard_s = self._clock()
                if message.WhichOneof("message") == "ping":
                    self.send(plan_pb2.AttachRequest(pong=plan_pb2.Pong(sequence=message.ping.sequence)))
                else:
                    self.inbox.put(message)
            self._end(Ended("the control plane closed the stream"))
        except grpc.RpcError as error:
            self._end(self._ended_by(error))
        except Exception as error:  # the thread's edge: without an Ended the compute thread would wait for ever
            logger.exception("reader failed")
            self._end(Ended(f"reader failed: {type(error).__name__}: {error}"))

    def _ended_by(self, error: grpc.RpcError) -> Ended:
        code = error.code() if isinstance(error, grpc.Call) else None
        details = (error.details() if isinstance(error, grpc.Call) else None) or str(error)
        if code is grpc.StatusCode.UNIMPLEMENTED:
            details = f"{self._address} takes no workers; give the control plane's worker port"
        if details.startswith(_UNREACHABLE):
            if (reason := self._explain(details)) is not None:
                return Ended(reason, code)
            return Ended(details.rpartition("Failed to connect to remote host: ")[2], code, is_unreachable=True)
        return Ended(f"{code.name if code else 'no status'}: {details}", code)

    def _end(self, ended: Ended) -> None:
        self.ended = ended
        self.inbox.put(ended)
