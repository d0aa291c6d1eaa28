"""What the control plane and a front end send each other: frames over a private socket, and how a call begins and ends.

A frame is a length, the number of a call, a kind and that many bytes. Messages of RPCs stay the bytes that gRPC
carries, which the front end does not parse; beginnings and ends of calls are JSON, once a call.
"""

from __future__ import annotations

import asyncio
import json
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any

HEADER = struct.Struct("<IIB")  # bytes of the body; number of the call, 0 for the front end as a whole; kind
COUNT = struct.Struct("<I")

# Responses of one call that the front end has and gRPC does not have yet. One would make the control plane wait for the
# other process after each token; many would keep tokens back that join where a client reads slowly.
MAX_UNWRITTEN = 8
ACKNOWLEDGE_EVERY = MAX_UNWRITTEN // 2  # fewer frames; below MAX_UNWRITTEN, so that the sender never waits for ever

Metadata = tuple[tuple[str, str | bytes], ...]


class Kind(IntEnum):
    """What a frame says."""

    # To the front end.
    SETUP = 1  # how to listen; the first frame
    READ = 2  # read one more message of the client
    RESPONSE = 3  # a message for the client
    BEGIN = 4  # send the initial metadata and say whether that went well
    STATUS = 5  # the call ends so, after its responses
    STOP = 6  # take no further calls, and end after this many milliseconds
    PING = 7  # show that the process runs
    # To the control plane.
    READY = 16  # the front end listens
    CALL = 17  # a call begins; no message is read before the control plane wants it
    REQUEST = 18  # a message of the client
    END = 19  # the client sends no more
    WRITTEN = 20  # gRPC took this many further responses
    BEGUN = 21  # the initial metadata was sent (1) or cannot be sent (0)
    GONE = 22  # the call is over at the client
    PONG = 23  # to a PING, at once


@dataclass(frozen=True, slots=True)
class Call:
    """How a call begins: everything about it but its messages."""

    method: str  # "/package.Service/Method"
    peer: str
    metadata: Metadata = field(repr=False)  # has the credential
    auth_context: Mapping[str, Sequence[bytes]]
    remaining_s: float | None  # to the client's deadline

    def encode(self) -> bytes:
        return json.dumps(
            [
                self.method,
                self.peer,
                [_shown(pair) for pair in self.metadata],
                {key: [value.decode("latin-1") for value in values] for key, values in self.auth_context.items()},
                self.remaining_s,
            ]
        ).encode()

    @classmethod
    def decode(cls, body: bytes) -> Call:
        method, peer, metadata, auth, remaining_s = json.loads(body)
        found = {key: [value.encode("latin-1") for value in values] for key, values in auth.items()}
        return cls(method, peer, tuple(_read(entry) for entry in metadata), found, remaining_s)


@dataclass(frozen=True, slots=True)
class Status:
    """How a call ends."""

    code: int  # as grpc.StatusCode has it
    details: str = ""
    trailing: Metadata = ()

    def encode(self) -> bytes:
        return json.dumps([self.code, self.details, [_shown(pair) for pair in self.trailing]]).encode()

    @classmethod
    def decode(cls, body: bytes) -> Status:
        code, details, trailing = json.loads(body)
        return cls(code, details, tuple(_read(entry) for entry in trailing))


def _shown(pair: tuple[str, str | bytes]) -> list[Any]:
    """JSON has no bytes: they are a text with a mark."""
    key, value = pair
    return [key, value] if isinstance(value, str) else [key, value.decode("latin-1"), 1]


def _read(entry: list[Any]) -> tuple[str, str | bytes]:
    key, value, *marks = entry
    return key, value.encode("latin-1") if marks else value


class Link(asyncio.Protocol):
    """One end of the socket. Frames that are sent in one turn of the event loop leave in one write."""

    def __init__(self, on_frame: Callable[[int, int, bytes], None], on_lost: Callable[[], object]) -> None:
        """`on_frame`: number of the call, kind, body. `on_lost`: the other process has ended."""
        self._on_frame = on_frame
        self._on_lost = on_lost
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._unsent: list[bytes] = []
        self._parts: list[bytes] = []  # of a frame that is not whole yet
        self._num_missing = 0  # bytes that its next part has to bring, at least

    def send(self, call_id: int, kind: Kind, body: bytes = b"") -> None:
        """Send a frame, after those before it. Dropped where the other process is gone."""
        if not self._unsent:
            self._loop.call_soon(self._flush)
        self._unsent.append(HEADER.pack(len(body), call_id, kind))
        self._unsent.append(body)

    def close(self) -> None:
        """Send what is left, then close the socket."""
        self._flush()
        if self._transport is not None:
            self._transport.close()

    def _flush(self) -> None:
        unsent, self._unsent = self._unsent, []
        if unsent and self._transport is not None and not self._transport.is_closing():
            self._transport.write(b"".join(unsent))

    # ---- for the event loop ----

    def connection_made(self, transport: Any) -> None:  # uvloop's are not of asyncio's class
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        if self._parts:
            self._parts.append(data)
            self._num_missing -= len(data)
            if self._num_missing > 0:
                return
            data = b"".join(self._parts)
        start, size, needed = 0, len(data), HEADER.size
        while size - start >= HEADER.size:
            num_bytes, call_id, kind = HEADER.unpack_from(data, start)
            end = start + HEADER.size + num_bytes
            if end > size:
                needed = HEADER.size + num_bytes
                break
            self._on_frame(call_id, kind, data[start + HEADER.size : end])
            start = end
        self._parts = [data[start:]] if start < size else []
        self._num_missing = needed - (size - start)

    def connection_lost(self, _error: Exception | None) -> None:
        self._transport = None
        self._on_lost()
