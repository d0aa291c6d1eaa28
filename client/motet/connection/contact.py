"""What the calls of one client know together about the server: its address, and whether it responds.

Also the words for what gRPC says when nobody does. No I/O.
"""

from __future__ import annotations

import logging
import re

from motet.errors import Cancelled, DeadlineExceeded, MotetError, Unavailable, Unimplemented, invalid_field
from motet.tls import handshake_error

logger = logging.getLogger(__name__)

# Prefixes of gRPC's own texts for calls that never left this machine.
_UNRESOLVED = ("errors resolving", "DNS resolution failed")
_UNSENT = ("failed to connect to all addresses", *_UNRESOLVED)
# gRPC's text for HTTP/2's REFUSED_STREAM (RFC 9113, 8.7): the connection has as many streams as the server allows, and
# none of this call was looked at. A server counts a stream for a moment after its end.
_REFUSED_STREAM = "Received RST_STREAM with error code 7"
_LAST_ERROR = re.compile(r".*last error: [A-Z_]+: (?:\S+: )?(?:Failed to connect to remote host: )?(.*)", re.DOTALL)
# Address forms of gRPC that are not a HOST:PORT.
_SCHEMES = ("dns:", "ipv4:", "ipv6:", "unix:", "unix-abstract:", "vsock:", "xds:", "passthrough:")
_USER = re.compile(r"(\w+://)?.*@", re.DOTALL)  # in front of the host of a URL; may hold a password
_MAX_PORT = 65535
_DRAINING = "DRAINING"  # reason of a server that shuts down: it takes nothing more


def check_target(target: str) -> str:
    """`target`, if it is an address that gRPC can dial. Raises InvalidArgument."""
    if target.startswith(_SCHEMES):
        return target
    if "@" in target:
        shown = _USER.sub(r"\1***@", target)
        raise invalid_field("target", f"{shown!r} has a user or a password; give HOST:PORT alone")
    scheme, separator, rest = target.partition("://")
    if separator:
        example = rest.partition("/")[0] or "127.0.0.1:50051"
        raise invalid_field("target", f"{target!r} is a URL; give HOST:PORT without {scheme}://, such as {example}")
    host, colon, port = target.rpartition(":")
    if not colon or (":" in host and not (host.startswith("[") and host.endswith("]"))):
        bracketed = f"[{target}]" if ":" in target else target or "127.0.0.1"
        raise invalid_field("target", f"{target!r} has no port; give HOST:PORT, such as {bracketed}:50051")
    if not host:
        raise invalid_field("target", f"{target!r} has no host; give HOST:PORT, such as 127.0.0.1:{port or '50051'}")
    if not port.isascii() or not port.isdigit() or not 0 < int(port) <= _MAX_PORT:
        raise invalid_field("target", f"{target!r} has the port {port!r}; a port is a number from 1 to {_MAX_PORT}")
    return target


def is_absence(error: MotetError) -> bool:
    """Whether no server took the call: none was reached, the connection broke, or the server is shutting down."""
    if not isinstance(error, Unavailable) or is_refused_stream(error):
        return False
    return not is_said_by_server(error) or error.reason == _DRAINING


def is_refused_stream(error: MotetError) -> bool:
    """Whether the server is there, and the connection has no room for the call's stream at present."""
    return isinstance(error, Unavailable) and not is_said_by_server(error) and _REFUSED_STREAM in error.message


def is_unsent(error: MotetError) -> bool:
    """Whether the call never left this machine."""
    return isinstance(error, Unavailable) and not is_said_by_server(error) and error.message.startswith(_UNSENT)


def is_undone(error: MotetError) -> bool:
    """Whether no server can have begun what the call requests: none got it, or it refused the call unseen."""
    return (
        is_unsent(error) or is_refused_stream(error) or (isinstance(error, Unavailable) and error.reason == _DRAINING)
    )


def is_made(error: MotetError) -> bool:
    """Whether the server made the change all the same: only the line of its audit log is not written yet."""
    return error.metadata.get("change_made") == "true"


def is_said_by_server(error: MotetError) -> bool:
    """Whether a Motet server chose this error: gRPC's own errors have no details."""
    return bool(error.reason) or error.retry_after_s is not None


class ServerContact:
    """Shared by all calls of one client. Safe in any thread: a lost race costs one line of the log."""

    def __init__(self, target: str, *, has_tls: bool = False, has_certificate: bool = False) -> None:
        self.target = target
        self._has_tls = has_tls
        self._has_certificate = has_certificate
        self.was_reached = False  # at least once
        self._is_lost = False  # was reached, and is not now

    def responded(self) -> None:
        """The server sent something."""
        self.was_reached = True
        if self._is_lost:
            self._is_lost = False
            logger.info("server responds again target=%s", self.target)

    def failed(self, error: MotetError) -> None:
        """An attempt ended with `error`."""
        if not isinstance(error, Unavailable) or is_said_by_server(error) or is_refused_stream(error):
            # A deadline and a cancelled call say nothing of the server, everything else is its response.
            if not isinstance(error, (DeadlineExceeded, Cancelled)):
                self.responded()
            return
        if not is_unsent(error):
            self.was_reached = True  # there was a connection
        if self.was_reached and not self._is_lost:
            self._is_lost = True
            logger.warning(
                "server gone, calls are tried again until their timeout target=%s error=%s",
                self.target,
                self.explained(error).message,
            )

    def explained(self, error: MotetError) -> MotetError:
        """`error`, with the server's address and the likely cause where gRPC's own text has neither."""
        if is_said_by_server(error):
            return error
        if is_refused_stream(error):
            return error.replaced(
                f"the server at {self.target} has no room for another call on this connection; try again in a moment",
                reason="CONNECTION_FULL",
            )
        if isinstance(error, Unavailable):
            match = _LAST_ERROR.fullmatch(error.message)
            cause = match[1] if match else error.message
            if is_unsent(error):
                in_tls = handshake_error(error.message, has_tls=self._has_tls, has_certificate=self._has_certificate)
                cause = in_tls or cause
            if error.message.startswith(_UNRESOLVED):
                cause = "its host name has no address; check the name"
            what = "no Motet server responds at" if is_unsent(error) else "the connection broke to the server at"
            return error.replaced(f"{what} {self.target}: {cause}", reason="SERVER_UNREACHABLE")
        if isinstance(error, Unimplemented):
            return error.replaced(
                f"the server at {self.target} does not know this call: it is another service, a Motet server of "
                "another version, or its port for workers; give the port for clients"
            )
        return error
