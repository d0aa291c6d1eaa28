"""Who makes a call. Built once for each RPC, and read by whatever needs to know.

The interceptor of both ports builds the Caller and makes it the current one for the handler and for the tasks that the
handler starts. Any other entrance does the same with `acting_as`.
"""

from __future__ import annotations

import contextlib
import ipaddress
from collections.abc import Iterator
from contextvars import ContextVar
from dataclasses import dataclass
from urllib.parse import unquote

from control_plane.access.principal import ANYBODY, DEFAULT_TENANT, THE_SERVER as SERVER_PRINCIPAL, Principal
from control_plane.observers.trace_context import trace_id_of


@dataclass(frozen=True, slots=True)
class Caller:
    """One client, as far as the server knows it."""

    tenant: str = DEFAULT_TENANT  # whom the call is counted for; empty: nobody, for a caller without a credential
    principal: Principal = ANYBODY  # who was authenticated, and what the credential allows
    peer: str = ""  # gRPC's name for the other end of the connection; empty: there is no connection
    traceparent: str = ""  # the trace that the call belongs to, in W3C's form; empty: the client named none
    tracestate: str = ""  # what tracing systems of the client pass along with `traceparent`; empty: nothing

    @property
    def host(self) -> str:
        """The host of `peer`: all of its connections, and for IPv6 all addresses of one customer, share it."""
        return host_of(self.peer)

    @property
    def holder(self) -> tuple[str, ...]:
        """Whose part of a shared limit the call takes, from the outside in.

        Tenant, principal and connection; of a caller that the server does not know, host and connection.
        """
        if self.principal.is_authenticated:
            return (self.tenant, self.principal.name, self.peer)
        return (self.host, self.peer)


THE_SERVER = Caller(principal=SERVER_PRINCIPAL)
_current: ContextVar[Caller] = ContextVar("caller", default=THE_SERVER)


def current_caller() -> Caller:
    """The caller of the RPC that runs at present; THE_SERVER outside of any."""
    return _current.get()


def log_context() -> dict[str, str]:
    """What every log record of a call has: the id of its trace."""
    traceparent = _current.get().traceparent
    return {"trace_id": trace_id_of(traceparent)} if traceparent else {}


@contextlib.contextmanager
def acting_as(caller: Caller) -> Iterator[None]:
    """Make `caller` the current one while the block runs, also for tasks that are started in the block."""
    token = _current.set(caller)
    try:
        yield
    finally:
        _current.reset(token)


def host_of(peer: str) -> str:
    """The host in gRPC's name of a peer. For IPv6: the network of 64 bits that one customer gets.

    Worked examples: "ipv4:10.0.0.7:5001" gives "ipv4:10.0.0.7", "ipv6:%5B2001:db8::7%5D:5001" gives
    "ipv6:2001:db8::/64", "unix:/run/motet" stays as it is.
    """
    kind, _, rest = peer.partition(":")
    if kind == "ipv4":
        return peer.rpartition(":")[0]
    if kind == "ipv6":
        address = unquote(rest).rpartition(":")[0].strip("[]").partition("%")[0]
        try:
            return f"ipv6:{ipaddress.IPv6Network((address, 64), strict=False)}"
        except ValueError:
            return peer
    return peer
