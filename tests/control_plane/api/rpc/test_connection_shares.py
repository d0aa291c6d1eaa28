"""A host that holds all connections of a port loses what is above its part, and others get in."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest

from control_plane.api.rpc import connection_shares, listeners
from control_plane.api.rpc.connection_shares import (
    IGNORED_S,
    ConnectionShares,
    Sockets,
    equal_part,
    peer_of,
    sockets_of,
)
from control_plane.api.rpc.rpc_server import rpc_server
from tests.control_plane.server_processes import STEP_S, control_plane

MAX = 40
HOG = "127.0.0.2"  # Linux has all of 127.0.0.0/8
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\x00\x00\x00\x04\x00\x00\x00\x00\x00"


@pytest.mark.parametrize(
    ("counts", "total", "part"),
    [
        ([100], 75, 75),
        ([100, 1], 75, 74),
        ([100, 100], 75, 37),
        ([100, 60, 10], 75, 32),
        ([1, 2, 3], 75, 3),  # nobody has too many
        ([5] * 100, 75, 1),
    ],
)
def test_a_part_is_equal_and_what_others_leave_is_shared(counts: list[int], total: int, part: int) -> None:
    assert equal_part(counts, total) == part


def test_peers_have_the_names_that_grpc_gives_them() -> None:
    assert peer_of(("10.0.0.7", 5001)) == "ipv4:10.0.0.7:5001"
    assert peer_of(("::ffff:10.0.0.7", 5001, 0, 0)) == "ipv4:10.0.0.7:5001"
    assert peer_of(("2001:db8::7", 5001, 0, 0)) == "ipv6:%5B2001:db8::7%5D:5001"


class Hog:
    """Connections of one host that say nothing."""

    def __init__(self, host: str = HOG) -> None:
        self.host = host
        self.connections: list[socket.socket] = []

    async def connect(self, port: int, timeout_s: float = 30.0) -> socket.socket:
        """Raises TimeoutError where the host is ignored."""
        connection = socket.socket()
        self.connections.append(connection)
        connection.setblocking(False)
        connection.bind((self.host, 0))
        loop = asyncio.get_running_loop()
        async with asyncio.timeout(timeout_s):
            await loop.sock_connect(connection, ("127.0.0.1", port))
        await loop.sock_sendall(connection, PREFACE)
        return connection

    def close(self) -> None:
        for connection in self.connections:
            connection.close()


async def is_closed(connection: socket.socket) -> bool:
    """Whether the server closes it; reads what comes before."""
    loop = asyncio.get_running_loop()
    try:
        async with asyncio.timeout(0.5):
            while await loop.sock_recv(connection, 4096):
                pass
    except TimeoutError:
        return False
    except OSError:
        return True
    return True


async def echo(request: bytes, _context: Any) -> bytes:
    return request


@pytest.fixture
async def port() -> AsyncIterator[int]:
    options = listeners.client_options(max_streams_per_connection=10, max_connections=MAX)
    server = rpc_server(options=options)
    server.add_registered_method_handlers("t.T", {"Echo": grpc.unary_unary_rpc_method_handler(echo)})
    address = listeners.bind(server, "127.0.0.1:0")
    await server.start()
    yield int(address.rpartition(":")[2])
    await server.stop(None)


async def is_served(port: int, *, soon: bool = False) -> bool:
    """Whether a new connection of another host gets in; `soon`: or a later one, until the server notices what ended."""
    channel: Any
    options = [("grpc.use_local_subchannel_pool", 1)]
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}", options=options) as channel:
        try:
            return bool(await channel.unary_unary("/t.T/Echo")(b"x", timeout=30, wait_for_ready=soon))
        except grpc.aio.AioRpcError:
            return False


async def until_held(port: int, count: int) -> None:
    """Until the server's side has so many connections."""
    async with asyncio.timeout(30):
        while True:
            sockets = sockets_of(port)
            num_held = sum(map(len, sockets.by_host.values()))
            sockets.close()
            if num_held >= count:
                return
            await asyncio.sleep(0)


async def test_a_full_port_lets_another_host_in_and_ignores_the_one_that_filled_it(port: int) -> None:
    now_s = 100.0
    shares, hog = ConnectionShares(MAX, clock=lambda: now_s), Hog()
    try:
        for _ in range(MAX):
            await hog.connect(port)
        await until_held(port, MAX)
        assert not await is_served(port), "gRPC lets nobody in above the bound"
        await shares.look(port)
        assert await is_served(port, soon=True)
        closed = [await is_closed(connection) for connection in hog.connections]
        assert closed.count(False) == MAX * 3 // 4, "three quarters for one host alone"
        with pytest.raises(TimeoutError):
            await hog.connect(port, timeout_s=0.5)
        now_s += IGNORED_S
        await shares.look(port)
        await hog.connect(port)
    finally:
        hog.close()
        await shares.close()


async def test_connections_with_accepted_calls_are_kept(port: int) -> None:
    shares, hog = ConnectionShares(MAX), Hog()
    try:
        connections = [await hog.connect(port) for _ in range(MAX)]
        await until_held(port, MAX)
        with contextlib.ExitStack() as stack:
            for connection in connections[:35]:
                stack.enter_context(shares.busy.busy(f"ipv4:{HOG}:{connection.getsockname()[1]}"))
            await shares.look(port)
        assert not any([await is_closed(connection) for connection in connections[:35]])
        assert all([await is_closed(connection) for connection in connections[35:]])
    finally:
        hog.close()
        await shares.close()


async def test_a_look_leaves_no_file_open(port: int, tmp_path: Path) -> None:
    """Files that are not sockets stayed open, all of them anew with each look."""
    with (tmp_path / "file").open("w"):
        before = len(list(Path("/proc/self/fd").iterdir()))
        for _ in range(3):
            sockets_of(port).close()
        assert len(list(Path("/proc/self/fd").iterdir())) == before


async def test_an_end_during_a_look_leaves_no_file_open(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The look was cancelled, and nobody closed what its thread found after that."""
    found, may_end, loop = asyncio.Event(), threading.Event(), asyncio.get_running_loop()

    def slow_sockets_of(port: int) -> Sockets:
        sockets = sockets_of(port)
        loop.call_soon_threadsafe(found.set)
        assert may_end.wait(30)
        return sockets

    monkeypatch.setattr(connection_shares, "sockets_of", slow_sockets_of)
    monkeypatch.setattr(connection_shares, "LOOK_EVERY_S", 0.0)
    before = len(list(Path("/proc/self/fd").iterdir()))
    shares = ConnectionShares(0)  # looks at the sockets each time
    shares.start(port)
    await found.wait()
    closing = asyncio.create_task(shares.close())
    await asyncio.sleep(0)
    may_end.set()
    await closing
    assert len(list(Path("/proc/self/fd").iterdir())) == before


async def test_a_port_with_room_is_left_alone(port: int) -> None:
    shares, hog = ConnectionShares(MAX), Hog()
    try:
        connections = [await hog.connect(port) for _ in range(MAX * 3 // 4)]
        await until_held(port, len(connections))
        await shares.look(port)
        assert not any([await is_closed(connection) for connection in connections])
    finally:
        hog.close()
        await shares.close()


@pytest.mark.parametrize("frontends", ["0", "2"])
async def test_a_host_that_opens_connections_again_and_again_excludes_nobody(tmp_path: Path, frontends: str) -> None:
    """Before, other hosts got none of a port's connections for as long as one host went on."""
    flags = ("--host-cache", "memory", "--max-connections", "64", "--frontends", frontends)
    async with control_plane(tmp_path, *flags) as (_, address, _):
        num_tried, is_over, hog, port = 0, False, Hog(), int(address.rpartition(":")[2])

        async def go_on() -> None:
            nonlocal num_tried
            while not is_over:
                await asyncio.sleep(0)
                num_tried += 1
                with contextlib.suppress(OSError):  # closed, or ignored
                    await hog.connect(port, timeout_s=1.0)
                while len(hog.connections) > 200:
                    hog.connections.pop(0).close()

        hogging = [asyncio.create_task(go_on()) for _ in range(8)]
        try:
            async with asyncio.timeout(30):
                while num_tried < 200:
                    await asyncio.sleep(0)
            channel: Any
            for _ in range(3):
                options = [("grpc.use_local_subchannel_pool", 1)]
                async with grpc.aio.insecure_channel(address, options=options) as channel:
                    call = channel.unary_unary("/motet.v1.StatusService/GetStatus")
                    assert await call(b"", timeout=STEP_S, wait_for_ready=True)
        finally:
            is_over = True
            await asyncio.gather(*hogging)
            hog.close()
