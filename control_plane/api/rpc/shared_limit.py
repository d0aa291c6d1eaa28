"""A limit on how much is in use at once, shared between hosts and between the connections of one host.

The interceptor holds RPCs in such limits, the upload receiver open uploads. Below the limit everybody is let in. At
the limit, only peers that hold less than their equal part are let in, so that no peer can shut the others out.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from control_plane.caller import host_of
from control_plane.errors import Exhausted

RETRY_AFTER_S = 1.0


class SharedLimit:
    """At most `limit` at once. Above the limit, peers that hold less than their equal part still get a place.

    The equal part of a host is the limit over the number of hosts that hold anything, and that of a connection is its
    host's part over the number of this host's connections that hold anything. With k hosts of one connection each,
    at most limit x (1 + 1/2 + ... + 1/k) are held.
    """

    def __init__(self, limit: int, what: str, *, retry_after_s: float = RETRY_AFTER_S) -> None:
        """`what` names the things in messages, in the plural."""
        assert limit > 0
        self._limit = limit
        self._what = what
        self._retry_after_s = retry_after_s
        # host -> connection -> how many it holds. Invariant: no number is 0, no host is without a connection.
        self._held: dict[str, dict[str, int]] = {}
        self._num_held = 0

    @property
    def num_held(self) -> int:
        """How many are held at present."""
        return self._num_held

    @property
    def num_hosts(self) -> int:
        """How many hosts hold anything at present."""
        return len(self._held)

    @contextlib.contextmanager
    def place(self, peer: str) -> Iterator[None]:
        """Hold one for gRPC's `peer` while the block runs. Raises Exhausted if the peer has its equal part."""
        host, connection = host_of(peer), peer
        if not self._has_room(host, connection):
            raise Exhausted(
                f"{self._num_held} {self._what} at once, at most {self._limit}, and your host and this connection hold "
                f"their equal part of them; try again",
                retry_after_s=self._retry_after_s,
            )
        connections = self._held.setdefault(host, {})
        connections[connection] = connections.get(connection, 0) + 1
        self._num_held += 1
        try:
            yield
        finally:
            self._give_back(host, connection)

    def _has_room(self, host: str, connection: str) -> bool:
        if self._num_held < self._limit:
            return True
        connections = self._held.get(host, {})
        part_of_host = self._limit / (len(self._held) + (host not in self._held))
        if sum(connections.values()) + 1 <= part_of_host:
            return True
        part_of_connection = part_of_host / (len(connections) + (connection not in connections))
        return connections.get(connection, 0) + 1 <= part_of_connection

    def _give_back(self, host: str, connection: str) -> None:
        self._num_held -= 1
        connections = self._held[host]
        connections[connection] -= 1
        if not connections[connection]:
            del connections[connection]
        if not connections:
            del self._held[host]
