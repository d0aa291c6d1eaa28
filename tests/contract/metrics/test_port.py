"""The metrics' port closes connections that do not send their request in time."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator

import pytest

from contract.metrics.port import MAX_CONNECTIONS, MetricsPort, Page

REQUEST = b"GET /healthz HTTP/1.1\r\nhost: x\r\n\r\n"


@pytest.fixture
def address() -> Iterator[tuple[str, int]]:
    port = MetricsPort("127.0.0.1:0", lambda _accept, _names: Page("text/plain", b""), lambda: True, timeout_s=0.5)
    port.start()
    host, _, number = port.address.rpartition(":")
    yield host, int(number)
    port.close()


def ends(connection: socket.socket) -> bool:
    """Whether the server closes a connection that sends a byte of its request every 20 ms."""
    connection.settimeout(0.02)
    for _ in range(1500):
        try:
            connection.send(b"x")
            if not connection.recv(4096):
                return True
        except TimeoutError:
            continue
        except OSError:
            return True
    return False


@pytest.mark.parametrize("begun", [b"", b"GET /healthz HTTP/1.1\r\n"], ids=["request line", "headers"])
def test_a_request_that_comes_byte_by_byte_ends_in_time(address: tuple[str, int], begun: bytes) -> None:
    """A byte every few seconds held a place for ever; with all of them held, probes found the process dead."""
    with contextlib.ExitStack() as stack:
        slow = [stack.enter_context(socket.create_connection(address)) for _ in range(MAX_CONNECTIONS)]
        for connection in slow:
            connection.sendall(begun)
        assert all(map(ends, slow))
        probe = stack.enter_context(socket.create_connection(address, timeout=30))
        probe.sendall(REQUEST)
        assert probe.recv(4096).startswith(b"HTTP/1.0 200")
