"""Who is at the other end of a connection, as far as the network tells."""

from __future__ import annotations

import ipaddress
from urllib.parse import unquote


def host_of(peer: str) -> str:
    """The host in gRPC's name of a peer, for IPv6 the network of 64 bits that one customer gets.

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
