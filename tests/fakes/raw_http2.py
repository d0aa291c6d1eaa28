"""A client of HTTP/2 in bytes, for headers that no gRPC client sends. Over a plain connection, one call each."""

from __future__ import annotations

import asyncio
import struct
from dataclasses import dataclass, field

_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_DATA, _HEADERS, _RESET, _SETTINGS = 0, 1, 3, 4
_END_STREAM, _END_HEADERS, _ACK = 1, 4, 1
_FRAME_HEADER_BYTES = 9


@dataclass
class RawResponse:
    """What came back for the one call."""

    headers: bytes = b""  # of all header frames, as they came
    is_ended: bool = False  # the server ended the call, by headers or by a reset
    is_closed: bool = False  # the server closed the connection before that
    frames: list[int] = field(default_factory=list)  # types of the call's frames


async def raw_call(address: str, path: bytes, *metadata: tuple[bytes, bytes], body: bytes = b"\0" * 5) -> RawResponse:
    """Call the method of `path` at HOST:PORT with one message, and wait for the end of the call."""
    host, _, port = address.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    try:
        headers = (
            (b":method", b"POST"),
            (b":scheme", b"http"),
            (b":path", path),
            (b":authority", b"localhost"),
            (b"te", b"trailers"),
            (b"content-type", b"application/grpc"),
            *metadata,
        )
        block = b"".join(_literal(name, value) for name, value in headers)
        writer.write(_PREFACE + _frame(_SETTINGS, 0, 0, b""))
        writer.write(_frame(_HEADERS, _END_HEADERS, 1, block) + _frame(_DATA, _END_STREAM, 1, body))
        return await _response(reader, writer)
    finally:
        writer.close()


async def _response(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> RawResponse:
    response = RawResponse()
    while not response.is_ended:
        try:
            header = await reader.readexactly(_FRAME_HEADER_BYTES)
            payload = await reader.readexactly(int.from_bytes(header[:3], "big"))
        except (asyncio.IncompleteReadError, ConnectionResetError):
            response.is_closed = True
            break
        kind, flags, stream = header[3], header[4], int.from_bytes(header[5:], "big")
        if kind == _SETTINGS and not flags & _ACK:
            writer.write(_frame(_SETTINGS, _ACK, 0, b""))
        if stream == 1:
            response.frames.append(kind)
            response.headers += payload if kind == _HEADERS else b""
            response.is_ended = bool(kind <= _HEADERS and flags & _END_STREAM) or kind == _RESET
    return response


def _literal(name: bytes, value: bytes) -> bytes:
    """A header field of HPACK, neither indexed nor in Huffman's code."""
    return b"\0" + _length(name) + name + _length(value) + value


def _length(text: bytes) -> bytes:
    most = 127  # of 7 bits
    if len(text) < most:
        return bytes([len(text)])
    rest, encoded = len(text) - most, bytearray([most])
    while rest >= 128:
        encoded.append(rest % 128 + 128)
        rest //= 128
    encoded.append(rest)
    return bytes(encoded)


def _frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    return struct.pack(">I", len(payload))[1:] + bytes([kind, flags]) + struct.pack(">I", stream) + payload
