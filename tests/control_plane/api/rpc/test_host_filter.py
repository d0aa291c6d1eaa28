"""The program that ignores hosts keeps every other one: run here on packets' addresses as the kernel runs it."""

from __future__ import annotations

import ipaddress
import random

import pytest

from control_plane.api.rpc.host_filter import MAX_HOSTS, program
from control_plane.caller import host_of

NETWORK_HEADER = 0xFFF00000


def is_kept(code: list[tuple[int, int, int, int]], source: str) -> bool:
    """What the program says of a packet from there."""
    address = ipaddress.ip_address(source)
    header = bytes([address.version << 4]) + bytes(11 if address.version == 4 else 7) + address.packed + bytes(20)
    value, at = 0, 0
    while True:
        kind, if_true, if_false, operand = code[at]
        at += 1
        if kind in (0x30, 0x20):
            offset = operand - NETWORK_HEADER
            value = int.from_bytes(header[offset : offset + (1 if kind == 0x30 else 4)], "big")
        elif kind == 0x74:
            value >>= operand
        elif kind == 0x15:
            at += if_true if value == operand else if_false
        else:
            assert kind == 0x06, "the program has no other instruction"
            return operand != 0


def peer(source: str) -> str:
    return f"ipv6:%5B{source}%5D:1" if ":" in source else f"ipv4:{source}:1"


@pytest.mark.parametrize("num_hosts", [1, 2, MAX_HOSTS])
def test_listed_hosts_are_ignored_and_others_kept(num_hosts: int) -> None:
    rng = random.Random(num_hosts)
    v4 = [str(ipaddress.IPv4Address(rng.getrandbits(32))) for _ in range(2 * num_hosts)]
    v6 = [str(ipaddress.IPv6Address(rng.getrandbits(128))) for _ in range(2 * num_hosts)]
    code = program([host_of(peer(source)) for source in (*v4[:num_hosts], *v6[:num_hosts])])
    assert all(0 <= jump <= 255 for _, *jumps, _ in code for jump in jumps)
    for sources in (v4, v6):
        assert [is_kept(code, source) for source in sources] == [False] * num_hosts + [True] * num_hosts
    neighbour = ipaddress.IPv6Address(int(ipaddress.IPv6Address(v6[0])) ^ 1)
    assert not is_kept(code, str(neighbour)), "an IPv6 customer is a network of 64 bits"
    other = ipaddress.IPv6Address(int(ipaddress.IPv6Address(v6[0])) ^ (1 << 64))
    assert is_kept(code, str(other))


def test_more_hosts_than_fit_are_left_out() -> None:
    sources = [f"10.0.{number // 256}.{number % 256}" for number in range(2 * MAX_HOSTS)]
    code = program([host_of(peer(source)) for source in sources])
    assert [is_kept(code, source) for source in sources] == [False] * MAX_HOSTS + [True] * MAX_HOSTS
