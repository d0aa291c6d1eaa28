"""How many connections there are, and how long each may say nothing or read nothing."""

from __future__ import annotations

import asyncio
import contextlib
import json
import ssl
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import uvicorn
from starlette.types import Receive, Scope, Send
from uvicorn.server import ServerState

from gateway.http.connections import HANDSHAKE_S, SILENCE_S, SLOW_READER_S, Connections, host_of
from tests.fakes.authority import Authority

WAIT_S = 60.0
HEAD = b"GET /%s HTTP/1.1\r\nhost: a\r\n\r\n"


class Port:
    """A port whose application responds at once, never, or without an end; the clock stands still."""

    def __init__(self, most: int, context: ssl.SSLContext | None = None) -> None:
        self.now_s = 0.0
        self.connections = Connections(most, None if context is None else lambda: context, lambda: self.now_s)
        self.num_gone = 0  # requests whose client the application saw leave
        self.port = 0
        self._writers: list[asyncio.StreamWriter] = []

    async def app(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = scope["path"]
        if path == "/wait":
            while (await receive())["type"] != "http.disconnect":
                pass
            self.num_gone += 1
            return
        await send({"type": "http.response.start", "status": 200, "headers": []})
        while path == "/endless":
            await send({"type": "http.response.body", "body": b"x" * 65536, "more_body": True})
            await asyncio.sleep(0)
        await send({"type": "http.response.body", "body": b"ok", "more_body": False})

    async def open(self, head: bytes = b"", host: str = "127.0.0.1") -> asyncio.StreamReader:
        """A connection from `host` that has sent `head`."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port, local_addr=(host, 0), limit=1024)
        self._writers.append(writer)
        writer.write(head)
        await writer.drain()
        return reader

    async def until(self, num_open: int, num_busy: int) -> None:
        """Wait until so many connections are open, and so many carry a request."""

        def found() -> tuple[int, int]:
            each = list(self.connections.open)
            return len(each), sum(one.carries_request for one in each)

        async with asyncio.timeout(WAIT_S):
            while found() != (num_open, num_busy):
                await asyncio.sleep(0.01)

    def write(self, data: bytes) -> None:
        """Send more on the connection that was opened last."""
        self._writers[-1].write(data)

    async def close(self) -> None:
        for writer in self._writers:
            writer.close()


@contextlib.asynccontextmanager
async def listening(most: int, context: ssl.SSLContext | None = None) -> AsyncIterator[Port]:
    port = Port(most, context)
    config = uvicorn.Config(port.app, interface="asgi3", log_config=None, access_log=False, timeout_keep_alive=3600)
    config.load()
    state, loop = ServerState(), asyncio.get_running_loop()

    def protocol() -> asyncio.Protocol:
        return port.connections.protocol(config=config, server_state=state, app_state={})

    server = await loop.create_server(protocol, "127.0.0.1", 0)
    port.port = server.sockets[0].getsockname()[1]
    try:
        yield port
    finally:
        await port.close()
        server.close()
        for task in state.tasks:
            task.cancel()
        await asyncio.gather(*state.tasks, return_exceptions=True)


async def ends(reader: asyncio.StreamReader) -> bool:
    """The other end closes this connection."""
    with contextlib.suppress(ConnectionResetError):
        async with asyncio.timeout(WAIT_S):
            while await reader.read(65536):
                pass
    return True


async def test_a_new_connection_takes_the_place_of_the_one_that_was_silent_longest() -> None:
    async with listening(2) as port:
        first = await port.open()
        port.now_s = 1.0
        await port.until(1, 0)
        await port.open()
        await port.until(2, 0)
        third = await port.open(HEAD % b"")
        assert await third.readline() == b"HTTP/1.1 200 OK\r\n"
        assert await ends(first) and len(port.connections) == 2


async def test_the_host_with_most_silent_connections_loses_one() -> None:
    async with listening(4) as port:
        await port.open(host="127.0.0.2")
        await port.until(1, 0)
        port.now_s = 1.0
        many = await port.open()
        await port.until(2, 0)
        port.now_s = 2.0
        for num_open in (3, 4):
            await port.open()
            await port.until(num_open, 0)
        await port.open(host="127.0.0.3")
        assert await ends(many) and len(port.connections) == 4


async def test_where_all_carry_requests_only_a_host_below_its_part_gets_one_more() -> None:
    async with listening(4) as port:
        for num_open in range(1, 5):
            await port.open(HEAD % b"wait")
            await port.until(num_open, num_open)
        assert await ends(await port.open(HEAD % b""))
        for _ in range(2):
            other = await port.open(HEAD % b"wait", host="127.0.0.2")
        await port.until(6, 6)
        assert await ends(await port.open(HEAD % b"", host="127.0.0.2"))
        assert not other.at_eof() and port.num_gone == 0


async def test_a_head_that_comes_byte_by_byte_has_one_time_limit() -> None:
    async with listening(4) as port:
        slow = await port.open(b"GET / HTT")
        await port.until(1, 0)
        port.now_s = SILENCE_S
        port.write(b"P/1.1\r\n")
        port.connections.sweep()
        assert len(port.connections) == 1
        port.now_s = SILENCE_S + 1
        port.connections.sweep()
        assert await ends(slow) and len(port.connections) == 0


async def test_a_body_that_nobody_reads_keeps_no_connection() -> None:
    async with listening(4) as port:
        reader = await port.open(b"POST / HTTP/1.1\r\nhost: a\r\ncontent-length: 1000000\r\n\r\n")
        assert await reader.readline() == b"HTTP/1.1 200 OK\r\n"
        await port.until(1, 0)
        port.now_s = SILENCE_S + 1
        port.write(b"x" * 1000)
        port.connections.sweep()
        assert await ends(reader) and len(port.connections) == 0


async def test_a_body_that_is_no_http_ends_its_connection_and_not_the_log(caplog: pytest.LogCaptureFixture) -> None:
    head = b"%s /%s HTTP/1.1\r\nhost: a\r\ntransfer-encoding: chunked\r\n\r\n1\r\na\r\n"
    async with listening(4) as port:
        for num_gone, (method, path) in enumerate([(b"POST", b"wait"), (b"HEAD", b"wait"), (b"POST", b"")], 1):
            reader = await port.open(head % (method, path))
            await port.until(1, int(path == b"wait"))
            if not path:
                assert await reader.readline() == b"HTTP/1.1 200 OK\r\n"
            port.write(b"this is not a length\r\n")
            assert await ends(reader)
            await port.until(0, 0)
            assert port.num_gone == min(num_gone, 2)
    assert [record for record in caplog.records if record.levelname == "ERROR"] == []


@pytest.mark.parametrize(
    ("sent", "status", "said"),
    [
        (b"hello\r\n\r\n", b"400 Bad Request", "illegal request line"),
        (b"GET / HTTP/1.1\r\n\r\n", b"400 Bad Request", "Missing mandatory Host"),
        (b"GET / HTTP/1.1\r\nhost: a\r\nx: %s" % (b"a" * 100_000), b"431 Request Header Fields Too Large", "too long"),
        (b"GET / HTTP/1.1\r\nhost: a\r\nx: %s\r\n\r\n" % (b"a" * 20_000), b"431 Request Header", "at most 16384"),
        (b"GET /%s HTTP/1.1\r\nhost: a\r\n\r\n" % (b"a" * 20_000), b"431 Request Header", "at most 16384"),
        (b"POST / HTTP/1.1\r\nhost: a\r\ntransfer-encoding: gzip\r\n\r\n", b"501 Not Implemented", "chunked"),
        # The application waits for the body.
        (b"POST /wait HTTP/1.1\r\nhost: a\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n", b"400 Bad Request", "chunk"),
    ],
)
async def test_what_is_no_http_is_refused_in_the_form_of_every_refusal(sent: bytes, status: bytes, said: str) -> None:
    async with listening(4) as port:
        reader = await port.open(sent)
        async with asyncio.timeout(WAIT_S):
            head, _, body = (await reader.read()).partition(b"\r\n\r\n")
        lines = head.lower().split(b"\r\n")
        assert head.startswith(b"HTTP/1.1 " + status)
        assert b"content-type: application/json" in lines and b"connection: close" in lines
        error = json.loads(body)["error"]
        assert error["type"] == "invalid_request_error" and error["param"] is None
        assert error["message"].startswith(("the request is not valid HTTP/1.1: ", "the head of the request has "))
        assert said in error["message"]
        await port.until(0, 0)


@pytest.mark.parametrize("target", [b"http://a/wait", b"HTTPS://a:1/wait?x=1", b"http://a/wait#b", b"/wait"])
async def test_a_target_may_be_a_whole_url(target: bytes) -> None:
    """Everything but `/wait` is answered at once."""
    async with listening(4) as port:
        await port.open(b"GET %s HTTP/1.1\r\nhost: a\r\n\r\n" % target)
        await port.until(1, 1)


async def test_a_whole_url_without_a_path_is_the_root() -> None:
    async with listening(4) as port:
        reader = await port.open(b"GET http://a HTTP/1.1\r\nhost: a\r\n\r\n")
        async with asyncio.timeout(WAIT_S):
            assert await reader.readline() == b"HTTP/1.1 200 OK\r\n"


async def test_a_request_that_runs_has_no_time_limit_here() -> None:
    async with listening(4) as port:
        reader = await port.open(HEAD % b"wait")
        await port.until(1, 1)
        port.now_s = 10 * SILENCE_S
        port.connections.sweep()
        assert len(port.connections) == 1 and not reader.at_eof()


async def test_a_reader_that_takes_nothing_is_ended_and_its_response_too() -> None:
    async with listening(4) as port:
        await port.open(HEAD % b"endless")
        await port.until(1, 1)
        [connection] = port.connections.open
        async with asyncio.timeout(WAIT_S):
            while connection.unread_since_s is None:
                await asyncio.sleep(0.01)
        port.now_s = SLOW_READER_S + 1
        port.connections.sweep()
        await port.until(0, 0)


async def test_handshakes_of_tls_count_and_can_be_replaced(tmp_path: Path) -> None:
    authority = Authority()
    cert, key = authority.issue("localhost", "127.0.0.1").write(tmp_path)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(cert, key)
    async with listening(2, context) as port:
        silent = [await port.open() for _ in range(2)]
        await port.until(2, 0)
        trusting = ssl.create_default_context(cafile=str(authority.write(tmp_path)))
        reader, writer = await asyncio.open_connection("127.0.0.1", port.port, ssl=trusting)
        writer.write(HEAD % b"")
        assert await reader.readline() == b"HTTP/1.1 200 OK\r\n"
        assert await ends(silent[0]) and len(port.connections) == 2
        writer.close()
        await port.until(1, 0)
        wrong = await port.open(b"GET / HTTP/1.1\r\n\r\n")
        assert await ends(wrong)
        await port.until(1, 0)
        assert SILENCE_S > HANDSHAKE_S
        port.now_s = SILENCE_S + 1
        port.connections.sweep()
        assert await ends(silent[1]) and len(port.connections) == 0


@pytest.mark.parametrize(
    ("address", "host"),
    [
        ("10.0.0.1", "10.0.0.1"),
        ("::ffff:10.0.0.1", "10.0.0.1"),
        ("2001:db8:1:2:3:4:5:6", "2001:db8:1:2::/64"),
        ("fe80::1%eth0", "fe80::/64"),
        ("", ""),
    ],
)
def test_addresses_of_one_network_are_one_host(address: str, host: str) -> None:
    class Transport:
        def get_extra_info(self, _name: str) -> Any:
            return (address, 1) if address else ""

    assert host_of(Transport()) == host  # type: ignore[arg-type]
