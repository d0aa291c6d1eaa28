"""The HTTP port on which a server process shows its metrics and its health: /metrics, /healthz and /readyz.

A few threads of its own serve it, so that a scrape waits for nothing else and nothing waits for a scrape. There is
neither TLS nor authentication: the port is for the operator's network.
"""

from __future__ import annotations

import contextlib
import io
import logging
import socket
import threading
import time
from collections.abc import Callable
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, NamedTuple
from urllib.parse import parse_qs, urlsplit

logger = logging.getLogger(__name__)

MAX_CONNECTIONS = 16  # at once; more are closed
TIMEOUT_S = 10.0  # for one request to arrive, however slowly it does, and for its response to be read


class Page(NamedTuple):
    """What /metrics shows."""

    content_type: str
    body: bytes


# Makes the page, given the Accept header and the value of ?names=. Raises ValueError for names it does not know.
Render = Callable[[str, str], Page]


def cannot_listen(flag: str, address: str, error: Exception) -> str:
    """What to tell the operator whose flag names the address."""
    reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    return f"{flag}: {address} cannot be listened on: {reason}; give another HOST:PORT, or end what listens there"


def check_can_listen(address: str) -> None:
    """Raise OSError or ValueError if HOST:PORT cannot be listened on; the port is free again after that."""
    host, _, port = address.rpartition(":")
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind((host.strip("[]"), int(port)))


class MetricsPort:
    """Listens from the beginning; start() serves."""

    def __init__(
        self, address: str, render: Render, is_ready: Callable[[], bool], *, timeout_s: float = TIMEOUT_S
    ) -> None:
        """`address`: HOST:PORT; port 0 takes a free one. Raises OSError if it cannot be listened on."""
        host, _, port = address.rpartition(":")
        parts = {"render": staticmethod(render), "is_ready": staticmethod(is_ready), "timeout": timeout_s}
        handler = type("Handler", (_Handler,), parts)
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        server_class = type("Server", (_Server,), {"address_family": family})
        self._server: _Server = server_class((host.strip("[]"), int(port)), handler)
        self._host = host
        self._thread = threading.Thread(target=self._server.serve_forever, name="motet-metrics", daemon=True)

    @property
    def address(self) -> str:
        """HOST:PORT that is listened on."""
        return f"{self._host}:{self._server.server_address[1]}"

    def start(self) -> None:
        """Serve until close()."""
        self._thread.start()
        logger.info("metrics at http://%s/metrics", self.address)

    def close(self) -> None:
        """End; requests under way may finish."""
        if self._thread.is_alive():
            self._server.shutdown()
            self._thread.join()
        self._server.server_close()


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False

    def __init__(self, address: tuple[str, int], handler: type[BaseHTTPRequestHandler]) -> None:
        self._places = threading.Semaphore(MAX_CONNECTIONS)
        super().__init__(address, handler)

    def process_request(self, request: object, client_address: object) -> None:
        if self._places.acquire(blocking=False):
            super().process_request(request, client_address)  # type: ignore[arg-type]  # as the base class has them
        else:
            self.shutdown_request(request)  # type: ignore[arg-type]

    def process_request_thread(self, request: object, client_address: object) -> None:
        try:
            super().process_request_thread(request, client_address)  # type: ignore[arg-type]
        finally:
            self._places.release()

    def handle_error(self, request: object, client_address: object) -> None:  # noqa: ARG002 - the base class has them
        """A client that left is not news; a mistake of ours in a scrape is."""
        logger.debug("metrics request failed", exc_info=True)


class _Request(io.RawIOBase):
    """What a client sends until a time. A socket's own timeout begins anew with every byte."""

    def __init__(self, connection: socket.socket, timeout_s: float) -> None:
        self._connection = connection
        self._until_s = time.monotonic() + timeout_s

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        """Raises TimeoutError."""
        left_s = self._until_s - time.monotonic()
        if left_s <= 0:
            raise TimeoutError("the request did not arrive in time")
        self._connection.settimeout(left_s)
        return self._connection.recv_into(buffer)


class _Handler(BaseHTTPRequestHandler):
    render: Render
    is_ready: Callable[[], bool]
    timeout = TIMEOUT_S
    server_version, sys_version = "motet", ""

    def setup(self) -> None:
        super().setup()
        self.rfile = io.BufferedReader(_Request(self.connection, self.timeout))

    def do_GET(self) -> None:
        self.connection.settimeout(self.timeout)  # for the response, as a whole
        url = urlsplit(self.path)
        if url.path == "/metrics":
            self._metrics(parse_qs(url.query).get("names", [""])[0])
        elif url.path == "/healthz":
            self._text(HTTPStatus.OK, "ok")
        elif url.path == "/readyz":
            is_ready = self.is_ready()
            self._text(HTTPStatus.OK if is_ready else HTTPStatus.SERVICE_UNAVAILABLE, "ok" if is_ready else "not ready")
        else:
            self._text(HTTPStatus.NOT_FOUND, "this port has /metrics, /healthz and /readyz")

    def _not_allowed(self) -> None:
        text = f"{self.command} is not served here: GET is\n"
        page = Page("text/plain; charset=utf-8", text.encode())
        self._send(HTTPStatus.METHOD_NOT_ALLOWED, page, allow="GET")
        self.close_connection = True  # a body that was not read may follow

    # As the base class names them.
    do_POST = do_PUT = do_PATCH = do_DELETE = do_OPTIONS = _not_allowed  # noqa: N815

    def _metrics(self, names: str) -> None:
        try:
            page = self.render(self.headers.get("Accept", ""), names)
        except ValueError as error:
            self._text(HTTPStatus.BAD_REQUEST, str(error))
        except Exception:
            logger.exception("metrics could not be rendered")
            self._text(HTTPStatus.INTERNAL_SERVER_ERROR, "the metrics could not be rendered; the server's log says why")
        else:
            self._send(HTTPStatus.OK, page)

    def _text(self, status: HTTPStatus, text: str) -> None:
        self._send(status, Page("text/plain; charset=utf-8", f"{text}\n".encode()))

    def _send(self, status: HTTPStatus, page: Page, *, allow: str = "") -> None:
        with contextlib.suppress(OSError):  # the client left
            self.send_response(status)
            if allow:
                self.send_header("Allow", allow)
            self.send_header("Content-Type", page.content_type)
            self.send_header("Content-Length", str(len(page.body)))
            self.end_headers()
            self.wfile.write(page.body)

    def log_message(self, format: str, *arguments: object) -> None:
        """One line per scrape would hide the others."""
