"""A port that this process holds without listening, so that its front ends can listen on it together."""

from __future__ import annotations

import contextlib
import socket

from control_plane.api.rpc.listeners import cannot_listen, try_to_bind


class ReservedPort:
    """Taken until `close`. Processes of other users cannot listen on it, nor can those that share no ports."""

    def __init__(self, address: str) -> None:
        """`address`: HOST:PORT; port 0 takes a free one. Raises OSError with the reason and what to do."""
        try_to_bind(address)
        host, _, port = address.rpartition(":")
        number = int(port)
        self._sockets: list[socket.socket] = []
        errors: list[OSError] = []
        found = socket.getaddrinfo(host.strip("[]"), number, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        for family, kind, protocol, _, where in found:
            with contextlib.ExitStack() as stack:
                reserved = stack.enter_context(socket.socket(family, kind, protocol))
                reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
                try:
                    reserved.bind((where[0], number, *where[2:]))
                except OSError as error:  # one of several addresses of a name may be missing
                    errors.append(error)
                    continue
                number = reserved.getsockname()[1]
                self._sockets.append(reserved)
                stack.pop_all()
        if not self._sockets:
            raise cannot_listen(address, str(errors[0].strerror)) from errors[0]
        self.address = f"{host}:{number}"

    def close(self) -> None:
        """Give the port up. Idempotent."""
        for reserved in self._sockets:
            reserved.close()
