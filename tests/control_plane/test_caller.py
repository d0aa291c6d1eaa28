"""Hosts behind gRPC's names of peers."""

from __future__ import annotations

import pytest

from control_plane.caller import host_of


@pytest.mark.parametrize(
    ("peer", "host"),
    [
        ("ipv4:10.0.0.7:5001", "ipv4:10.0.0.7"),
        ("ipv6:%5B2001:db8::7%5D:5001", "ipv6:2001:db8::/64"),
        ("ipv6:%5B2001:db8::ffff:7%5D:5002", "ipv6:2001:db8::/64"),
        ("ipv6:%5B2001:db8:0:1::7%5D:5001", "ipv6:2001:db8:0:1::/64"),
        ("ipv6:[2001:db8:0:0:9::7]:5001", "ipv6:2001:db8::/64"),
        ("ipv6:[fe80::1%25eth0]:5001", "ipv6:fe80::/64"),
        ("ipv6:%5Bfe80::1%25eth0%5D:5001", "ipv6:fe80::/64"),
        ("ipv6:what is this", "ipv6:what is this"),
        ("ipv6:%5Bno-address%5D:5001", "ipv6:%5Bno-address%5D:5001"),
        ("unix:/run/motet", "unix:/run/motet"),
        ("", ""),
    ],
)
def test_one_customer_has_one_host(peer: str, host: str) -> None:
    assert host_of(peer) == host
