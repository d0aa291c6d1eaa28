"""Keeps one host from holding every connection of a port.

gRPC counts the connections of all hosts together and does not list them. Their sockets are this process's own, so it
finds them among its open files. When a port is nearly full, hosts with more
than their equal part lose connections that carry no accepted call, and the kernel ignores new ones of theirs for a
while. Others get in meanwhile. A connection with an accepted call is never closed. Linux only; nothing elsewhere.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from control_plane.api.rpc import host_filter
from control_plane.caller import host_of
from control_plane.daemon_threads import DaemonThreads
from control_plane.waits import is_set_within

logger = logging.getLogger(__name__)

LOOK_EVERY_S = 0.5
FULL, KEPT = 7 / 8, 3 / 4  # shares of the bound: from the first on, hosts are cut until all together hold the second
IGNORED_S = 10.0  # how long new connections of a host are ignored that was cut
_FILES = Path("/proc/self/fd")


class BusyPeers:
    """The peers whose calls were accepted and run, by gRPC's name. Used from the event loop."""

    def __init__(self) -> None:
        self._calls: Counter[str] = Counter()

    def __contains__(self, peer: str) -> bool:
        return peer in self._calls

    @contextlib.contextmanager
    def busy(self, peer: str) -> Iterator[None]:
        """Around an accepted call of the peer."""
        self._calls[peer] += 1
        try:
            yield
        finally:
            self._calls[peer] -= 1
            if not self._calls[peer]:
                del self._calls[peer]


@dataclass
class Sockets:
    """Duplicates of one port's sockets. They do not end with the connection: `close` them."""

    listeners: list[socket.socket] = field(default_factory=list)
    by_host: dict[str, dict[str, socket.socket]] = field(default_factory=dict)  # host -> peer -> connection

    def close(self) -> None:
        for one in (*self.listeners, *(one for peers in self.by_host.values() for one in peers.values())):
            one.close()


class ConnectionShares:
    """Looks after the connections of one port. `max_connections`: those that gRPC lets in."""

    def __init__(
        self, max_connections: int, busy: BusyPeers | None = None, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.busy = BusyPeers() if busy is None else busy
        self._max = max_connections
        self._clock = clock
        self._ignored_until_s: dict[str, float] = {}  # by host
        self._thread = DaemonThreads(1, name="connections")
        self._task: asyncio.Task[None] | None = None
        self._closing = asyncio.Event()

    def start(self, port: int) -> None:
        """Look again and again until `close`."""
        if _FILES.is_dir():
            self._task = asyncio.create_task(self._run(port), name="connections")

    async def close(self) -> None:
        """Idempotent."""
        self._closing.set()
        if self._task is not None:  # not cancelled: nobody would close the sockets that a look finds after that
            await asyncio.wait([self._task])
        self._thread.close()

    async def look(self, port: int) -> None:
        """Cut hosts if the port is nearly full, and let hosts in again whose time is over."""
        if not self._ignored_until_s and await self._thread.run(_num_files) < self._max * FULL:
            return
        sockets = await self._thread.run(sockets_of, port)
        try:
            self._judge(sockets)
        finally:
            sockets.close()

    def _judge(self, sockets: Sockets) -> None:
        now_s, former = self._clock(), set(self._ignored_until_s)
        counts = {host: len(peers) for host, peers in sockets.by_host.items()}
        if sum(counts.values()) >= self._max * FULL:
            part = equal_part(counts.values(), int(self._max * KEPT))
            for host in (host for host, count in counts.items() if count > part):
                self._ignored_until_s[host] = now_s + IGNORED_S
                num_closed = self._cut(sockets.by_host[host], part)
                if host not in former:
                    logger.warning(
                        "host cut to its part of the connections host=%s held=%d part=%d closed=%d",
                        *(host, counts[host], part, num_closed),
                    )
        self._ignored_until_s = {host: until_s for host, until_s in self._ignored_until_s.items() if until_s > now_s}
        if set(self._ignored_until_s) != former:
            for listener in sockets.listeners:
                with contextlib.suppress(OSError):  # a kernel without filters: hosts are cut all the same
                    host_filter.ignore(listener, list(self._ignored_until_s))

    def _cut(self, connections: Mapping[str, socket.socket], part: int) -> int:
        """How many were closed."""
        idle = [one for peer, one in connections.items() if peer not in self.busy]
        closed = idle[: len(connections) - part]
        for one in closed:
            with contextlib.suppress(OSError):  # it has ended meanwhile
                one.shutdown(socket.SHUT_RDWR)
        return len(closed)

    async def _run(self, port: int) -> None:
        while not await is_set_within(self._closing, LOOK_EVERY_S):
            try:
                await self.look(port)
            except Exception:  # the loop's edge
                logger.exception("connections could not be looked at")


def equal_part(counts: Collection[int], total: int) -> int:
    """The most that each may hold so that all together hold at most `total`."""
    left = sorted(counts)
    while left and total // len(left) >= left[0]:  # who holds less than an equal part leaves the rest to the others
        total -= left.pop(0)
    return max(total // len(left), 1) if left else max(counts, default=1)


def sockets_of(port: int) -> Sockets:
    """The listening sockets of this process on a TCP port, and the connections to it."""
    found = Sockets()
    for path in _FILES.iterdir():
        if (one := _socket(int(path.name))) is None:
            continue
        with contextlib.ExitStack() as stack:
            stack.enter_context(one)
            try:
                if one.family not in (socket.AF_INET, socket.AF_INET6) or one.getsockname()[1] != port:
                    continue
                if one.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                    found.listeners.append(one)
                else:
                    peer = peer_of(one.getpeername())
                    found.by_host.setdefault(host_of(peer), {})[peer] = one
            except OSError:  # it has ended
                continue
            stack.pop_all()
    return found


def _socket(file: int) -> socket.socket | None:
    """A duplicate of a descriptor of this process that is a socket; None of another one, or one closed meanwhile."""
    try:
        copied = os.dup(file)
    except OSError:
        return None
    try:
        return socket.socket(fileno=copied)
    except OSError:
        os.close(copied)
        return None


def peer_of(address: tuple[str, int, int, int] | tuple[str, int]) -> str:
    """GRPC's name of the peer of a connection."""
    host, port = address[0].removeprefix("::ffff:"), address[1]
    return f"ipv6:%5B{host}%5D:{port}" if ":" in host else f"ipv4:{host}:{port}"


def _num_files() -> int:
    """How many files this process has open: never fewer than connections."""
    return _FILES.stat().st_size or sum(1 for _ in _FILES.iterdir())  # kernels before 6.2 say 0
