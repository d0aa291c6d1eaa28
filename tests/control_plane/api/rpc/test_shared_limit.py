"""Nobody shuts the others out of a shared limit, and alone a peer may use all of it."""

from __future__ import annotations

import contextlib
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from control_plane.api.rpc.shared_limit import SharedLimit
from control_plane.errors import Exhausted


def fill(limit: SharedLimit, peer: str, held: contextlib.ExitStack, *, at_most: int = 10_000) -> int:
    """Take places until one is refused; how many were given."""
    for count in range(at_most):
        try:
            held.enter_context(limit.place(peer))
        except Exhausted:
            return count
    return at_most


def test_one_peer_alone_gets_all_of_it_and_no_more() -> None:
    limit = SharedLimit(10, "requests", retry_after_s=3.0)
    with contextlib.ExitStack() as held:
        assert fill(limit, "ipv4:10.0.0.1:1", held) == 10
        with (
            pytest.raises(Exhausted, match="10 requests at once, at most 10") as caught,
            limit.place("ipv4:10.0.0.1:1"),
        ):
            pass
        assert caught.value.retry_after_s == 3.0
    assert limit.num_held == 0


def test_another_host_gets_its_equal_part_of_a_full_limit() -> None:
    limit = SharedLimit(12, "requests")
    with contextlib.ExitStack() as held:
        for port in range(4):
            fill(limit, f"ipv4:10.0.0.1:{port}", held, at_most=3)
        assert fill(limit, "ipv4:10.0.0.2:1", held) == 6
        assert fill(limit, "ipv4:10.0.0.3:1", held) == 4
        assert fill(limit, "ipv4:10.0.0.1:9", held) == 0, "its host has more than its part, and so has 1/5 of it"


def test_another_connection_of_the_same_host_gets_its_part_of_the_hosts_part() -> None:
    limit = SharedLimit(4096, "requests")
    with contextlib.ExitStack() as held:
        taken = [fill(limit, f"ipv4:127.0.0.1:{port}", held, at_most=100) for port in range(41)]
        assert sum(taken) >= 4096, "the limit is full"
        assert fill(limit, "ipv4:127.0.0.1:50000", held, at_most=100) == 4096 // 42


def test_a_place_is_given_back_when_the_block_fails() -> None:
    limit = SharedLimit(1, "requests")
    with pytest.raises(ValueError, match="inside"), limit.place("unix:"):
        raise ValueError("inside")
    with limit.place("unix:"):
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
            place.enter_context(limit.place(f"ipv4:10.0.0.{host}:1"))
            held.append(place)
        assert limit.num_held == len(held) <= size * (1 + math.log(6))
    for place in held:
        place.close()
    assert limit.num_held == limit.num_hosts == 0
