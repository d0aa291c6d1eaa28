"""Fetches a small file from a URL that the operator gave, within a time that no server can draw out.

Blocks: call it in a thread.
"""

from __future__ import annotations

import http.client
import io
import socket
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from typing import Any
from urllib.parse import urlsplit

from contract.settings.addresses import is_loopback
from control_plane.access.authentication.grants import InvalidAccessFile

MAX_BYTES = 1 << 20
SOCKET_TIMEOUT_S = 10.0  # of one read, and of each handshake
FETCH_TIMEOUT_S = 20.0  # of a response as a whole, its head included

Clock = Callable[[], float]


def fetch_url(url: str, *, clock: Clock = time.monotonic) -> bytes:
    """What is at the URL. Raises OSError if nothing usable responds, ValueError if the URL is not that of a file."""
    deadline_s, content = clock() + FETCH_TIMEOUT_S, bytearray()
    handlers = [_NoRedirects(), _Http(deadline_s, clock), _Https(deadline_s, clock)]
    if is_loopback(f"{urlsplit(url).hostname}:0"):
        handlers.append(urllib.request.ProxyHandler({}))  # a proxy would look on its own machine
    opener = urllib.request.build_opener(*handlers)
    try:
        with opener.open(url, timeout=SOCKET_TIMEOUT_S) as response:
            while chunk := response.read1(1 << 16):
                content += chunk
                if len(content) > MAX_BYTES:
                    raise InvalidAccessFile(f"the response is larger than {MAX_BYTES} bytes")
    except urllib.error.HTTPError as error:
        error.close()
        if error.code < 500:
            raise ValueError(f"the response is HTTP status {error.code}; give the URL of the key set itself") from error
        raise OSError(f"the response is HTTP status {error.code}") from error
    except http.client.HTTPException as error:
        raise OSError(f"the response is not valid HTTP: {type(error).__name__}") from error
    return bytes(content)


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    """A redirect may lead anywhere, also to a plaintext address."""

    def redirect_request(self, *_: Any, **__: Any) -> None:
        return None


class _TimedReader(io.RawIOBase):
    """A connection's bytes until a deadline. The time limit of a socket begins anew with each byte that comes."""

    def __init__(self, connection: socket.socket, deadline_s: float, clock: Clock) -> None:
        self._connection = connection
        self._bytes = connection.makefile("rb", buffering=0)
        self._deadline_s = deadline_s
        self._clock = clock

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int | None:
        left_s = self._deadline_s - self._clock()
        if left_s <= 0:
            raise OSError(f"the response took longer than {FETCH_TIMEOUT_S:g} s")
        self._connection.settimeout(min(left_s, SOCKET_TIMEOUT_S))
        return self._bytes.readinto(buffer)

    def close(self) -> None:
        self._bytes.close()
        super().close()


class _Timed(urllib.request.AbstractHTTPHandler):
    """Reads each response, its head included, until one deadline."""

    def __init__(self, deadline_s: float, clock: Clock) -> None:
        super().__init__()
        self._deadline_s = deadline_s
        self._clock = clock

    def do_open(self, http_class: Any, *arguments: Any, **more: Any) -> http.client.HTTPResponse:
        def connection(*own: Any, **settings: Any) -> Any:
            made = http_class(*own, **settings)
            made.response_class = self._response
            return made

        return super().do_open(connection, *arguments, **more)

    def _response(self, connection: socket.socket, *arguments: Any, **more: Any) -> http.client.HTTPResponse:
        made = http.client.HTTPResponse(connection, *arguments, **more)
        untimed, made.fp = made.fp, io.BufferedReader(_TimedReader(connection, self._deadline_s, self._clock))
        untimed.close()
        return made


class _Http(_Timed, urllib.request.HTTPHandler):
    pass


class _Https(_Timed, urllib.request.HTTPSHandler):
    pass
