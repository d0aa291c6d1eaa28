"""Nobody shuts the others out of a shared limit, and alone a peer may use all of it."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Sequence

import pytest
from hypothesis import given, strategies as st

from control_plane.access.principal import Principal, Role
from control_plane.api.rpc.shared_limit import SharedLimit
from control_plane.caller import Caller
from control_plane.errors import Exhausted


def of(peer: str) -> tuple[str, ...]:
    """Of a caller that the server does not know."""
    return Caller(peer=peer).holder


def fill(limit: SharedLimit, holder: Sequence[str], held: contextlib.ExitStack, *, at_most: int = 10_000) -> int:
    """Take places until one is refused; how many were given."""
    for count in range(at_most):
        try:
            held.enter_context(limit.place(holder))
        except Exhausted:
            return count
    return at_most


def test_one_peer_alone_gets_all_of_it_and_no_more() -> None:
    limit = SharedLimit(10, "requests", retry_after_s=3.0)
    with contextlib.ExitStack() as held:
        assert fill(limit, of("ipv4:10.0.0.1:1"), held) == 10
        with (
            pytest.raises(Exhausted, match="at most 10 requests at once") as caught,
            limit.place(of("ipv4:10.0.0.1:1")),
        ):
            pass
        assert caught.value.retry_after_s == pytest.approx(3.75, abs=0.75)
    assert limit.num_held == 0


def test_another_host_gets_its_equal_part_of_a_full_limit() -> None:
    limit = SharedLimit(12, "requests")
    with contextlib.ExitStack() as held:
        for port in range(4):
            fill(limit, of(f"ipv4:10.0.0.1:{port}"), held, at_most=3)
        assert fill(limit, of("ipv4:10.0.0.2:1"), held) == 6
        assert fill(limit, of("ipv4:10.0.0.3:1"), held) == 4
        assert fill(limit, of("ipv4:10.0.0.1:9"), held) == 0, "its host has more than its part, and so has 1/5 of it"


def test_another_connection_of_the_same_host_gets_its_part_of_the_hosts_part() -> None:
    limit = SharedLimit(4096, "requests")
    with contextlib.ExitStack() as held:
        taken = [fill(limit, of(f"ipv4:127.0.0.1:{port}"), held, at_most=100) for port in range(41)]
        assert sum(taken) >= 4096, "the limit is full"
        assert fill(limit, of("ipv4:127.0.0.1:50000"), held, at_most=100) == 4096 // 42


def known(tenant: str, key: str, peer: str) -> tuple[str, ...]:
    """Of an authenticated caller."""
    return Caller(tenant, Principal(f"key:{key}", frozenset({Role.INFER}), (tenant,)), peer).holder


def test_a_tenant_gains_nothing_by_more_keys_hosts_or_connections() -> None:
    limit = SharedLimit(60, "requests")
    with contextlib.ExitStack() as held:
        for number in range(60):
            fill(limit, known("hog", f"k{number}", f"ipv4:10.0.0.{number}:1"), held, at_most=1)
        assert fill(limit, known("quiet", "one", "ipv4:10.0.0.1:9"), held) == 30, (
            "half of it, though 60 keys came first"
        )
        assert fill(limit, known("third", "one", "ipv4:10.0.0.1:9"), held) == 20
        assert fill(limit, known("hog", "new", "ipv4:10.0.0.99:1"), held) == 0


def test_principals_of_a_tenant_share_its_part_and_connections_share_their_principals() -> None:
    limit = SharedLimit(60, "requests")
    with contextlib.ExitStack() as held:
        assert fill(limit, known("a", "batch", "ipv4:10.0.0.1:1"), held) == 60
        assert fill(limit, known("a", "chat", "ipv4:10.0.0.1:1"), held) == 30
        assert fill(limit, known("a", "batch", "ipv4:10.0.0.1:2"), held) == 15
    assert limit.num_held == limit.num_holders == 0


def test_a_place_is_given_back_when_the_block_fails() -> None:
    limit = SharedLimit(1, "requests")
    with pytest.raises(ValueError, match="inside"), limit.place(of("unix:")):
        raise ValueError("inside")
    with limit.place(of("unix:")):
        assert limit.num_held == 1


@given(st.integers(1, 30), st.lists(st.tuples(st.integers(0, 5), st.integers(0, 40)), max_size=150))
def test_counts_balance_and_the_total_stays_bounded(size: int, moves: list[tuple[int, int]]) -> None:
    """Whatever comes and goes: what is held is the sum of the parts, within the bound of a host with one connection."""
    limit = SharedLimit(size, "requests")
    held: list[contextlib.ExitStack] = []
    for host, back in moves:
        if back < len(held):
            held.pop(back).close()
            continue
        place = contextlib.ExitStack()
        with contextlib.suppress(Exhausted):
            place.enter_context(limit.place(of(f"ipv4:10.0.0.{host}:1")))
            held.append(place)
        assert limit.num_held == len(held) <= size * (1 + math.log(6))
    for place in held:
        place.close()
    assert limit.num_held == limit.num_holders == 0
