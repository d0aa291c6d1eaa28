"""A file at a URL: what is taken, and how long a server may take."""

from __future__ import annotations

import contextlib
import itertools
import ssl
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar

import pytest

from control_plane.access.authentication.fetching import MAX_BYTES, fetch_url
from tests.fakes.authority import LOCALHOST, Authority

CONTENT = b'{"keys": []}'


class Pages(BaseHTTPRequestHandler):
    pages: ClassVar[dict[str, tuple[int, bytes]]] = {
        "/jwks": (200, CONTENT),
        "/none": (404, b""),
        "/broken": (503, b""),
    }

    def do_GET(self) -> None:
        if self.path == "/long":
            self.pages[self.path] = (200, b" " * (MAX_BYTES + 1))
        if self.path == "/endless":  # a head that never ends, a byte now and then
            self.wfile.write(b"HTTP/1.1 200 OK\r\nX-Padding: ")
            self.rfile.read(1)
            return
        if self.path == "/junk":
            self.wfile.write(b"junk\r\n\r\n")
            return
        status, body = (302, b"") if self.path == "/elsewhere" else self.pages[self.path]
        self.send_response(status)
        if status == 302:
            self.send_header("Location", "/jwks")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        with contextlib.suppress(OSError):  # the client left, as it should at a long page
            self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        pass


@contextlib.contextmanager
def served(scheme: str = "http", context: ssl.SSLContext | None = None) -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Pages)
    if context is not None:
        server.socket = context.wrap_socket(server.socket, server_side=True, do_handshake_on_connect=False)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield f"{scheme}://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()
    thread.join()


@pytest.fixture(scope="module")
def web() -> Iterator[str]:
    with served() as url:
        yield url


def test_a_key_set_is_fetched_from_a_url_of_this_machine(web: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
    assert fetch_url(f"{web}/jwks") == CONTENT


def test_a_server_of_another_authority_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own, other = Authority(), Authority()
    cert, key = own.issue(*LOCALHOST).write(tmp_path)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(cert, key)
    with served("https", context) as url:
        monkeypatch.setenv("SSL_CERT_FILE", str(own.write(tmp_path)))
        assert fetch_url(f"{url}/jwks") == CONTENT
        (tmp_path / "other.pem").write_bytes(other.pem)
        monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "other.pem"))
        with pytest.raises(OSError, match="certificate verify failed"):
            fetch_url(f"{url}/jwks")


@pytest.mark.parametrize(
    ("path", "error", "message"),
    [
        ("/none", ValueError, "HTTP status 404; give the URL of the key set"),
        ("/elsewhere", ValueError, "HTTP status 302; give the URL of the key set itself"),
        ("/long", ValueError, "larger than 1048576 bytes"),
        ("/broken", OSError, "HTTP status 503"),
        ("/junk", OSError, "not valid HTTP"),
    ],
)
def test_responses_that_cannot_be_used_are_refused(web: str, path: str, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        fetch_url(f"{web}{path}")


@pytest.mark.parametrize(("path", "before"), [("/jwks", [0.0]), ("/endless", [0.0, 1.0])])
def test_a_slow_response_ends_at_its_time(web: str, path: str, before: list[float]) -> None:
    """Its head, too: a server that sends a byte of it now and then would keep the keys from being fetched again."""
    times = itertools.chain(before, itertools.repeat(21.0))
    with pytest.raises(OSError, match="longer than 20 s"):
        fetch_url(f"{web}{path}", clock=lambda: next(times))


def test_nobody_responding_is_an_oserror() -> None:
    with pytest.raises(OSError):
        fetch_url("http://127.0.0.1:1/jwks")
