"""The ledger's arithmetic, by random walks."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import given, strategies as st

from control_plane.errors import PinBudgetExceeded
from control_plane.host_cache.ledger import Ledger, Sizes

_STEPS = st.lists(
    st.tuples(
        st.sampled_from(["reserve", "commit", "release", "remove", "left", "touch", "pin", "unpin", "scan"]),
        st.integers(0, 7),
        st.integers(1, 60),
    ),
    max_size=60,
)


@given(_STEPS)
def test_the_budget_holds_and_pins_stay(steps: list[tuple[str, int, int]]) -> None:
    ledger = Ledger(100)
    reserved: dict[str, Sizes] = {}
    pinned: set[str] = set()
    for action, number, size in steps:
        digest = str(number)
        held_pins = {pin for pin in pinned if pin in ledger}
        if action == "reserve":
            if ledger.reserve(digest, (1, size)):
                assert not {victim for victim, _ in ledger.leaving} & held_pins
                reserved[digest] = (1, size)
                held_pins.discard(digest)
        elif action == "commit" and digest in reserved:
            ledger.commit(digest)
            del reserved[digest]
        elif action == "release":
            ledger.release(digest)
            reserved.pop(digest, None)
        elif action == "remove":
            ledger.remove(digest)
            held_pins.discard(digest)
        elif action == "left":
            ledger.left(digest)
        elif action == "touch":
            ledger.touch(digest)
        elif action == "pin":
            try:
                ledger.pin(digest, size)
                pinned.add(digest)
            except PinBudgetExceeded:
                pass
        elif action == "unpin":
            ledger.unpin(digest)
            pinned.discard(digest)
        elif action == "scan":
            ledger.replace_all({digest: (1, size), "other": (200,)})
            reserved.clear()
            held_pins = set()
        leaving_bytes = sum(sum(sizes) for _, sizes in ledger.leaving)
        held_bytes = sum(sum(ledger.sizes(held) or ()) for held in ledger.digests)
        assert ledger.used_bytes == held_bytes + leaving_bytes + sum(map(sum, reserved.values()))
        assert ledger.used_bytes - leaving_bytes <= 100
        assert all(pin in ledger for pin in held_pins)


def test_the_oldest_goes_first_and_no_more_than_needed() -> None:
    ledger = Ledger(10)
    for digest in "abc":
        assert ledger.reserve(digest, (3,))
        ledger.commit(digest)
    ledger.touch("a")
    assert ledger.reserve("d", (4,))
    assert ledger.leaving == [("b", (3,))]


def test_what_cannot_fit_evicts_nothing() -> None:
    ledger = Ledger(10)
    ledger.reserve("a", (5,))
    ledger.commit("a")
    assert not ledger.reserve("b", (11,))
    assert "a" in ledger


def test_bytes_that_are_still_there_leave_no_room() -> None:
    """What was evicted and could not be removed counts, until it is gone."""
    ledger = Ledger(10)
    ledger.reserve("a", (8,))
    ledger.commit("a")
    ledger.remove("a")
    assert ledger.used_bytes == 8
    assert not ledger.reserve("b", (8,))
    assert not ledger.reserve("a", (8,))
    ledger.left("a")
    assert ledger.reserve("b", (8,))


class CountedSizes(tuple[int, ...]):
    """Counts how often any sizes are summed up."""

    num_sums = 0

    def __iter__(self) -> Iterator[int]:
        CountedSizes.num_sums += 1
        return super().__iter__()


def test_the_work_for_an_eviction_does_not_grow_with_the_number_of_adapters(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CountedSizes, "num_sums", 0)
    ledger = Ledger(1000)
    ledger.replace_all({f"{number:064x}": CountedSizes((1, 9)) for number in range(2000)})
    assert (len(ledger), ledger.used_bytes, len(ledger.leaving)) == (100, 20_000, 1900)
    for digest, _ in ledger.leaving:
        ledger.left(digest)
    for number in range(200):
        assert ledger.reserve(str(number), CountedSizes((1, 9)))
        ledger.commit(str(number))
        for digest, _ in ledger.leaving:
            ledger.left(digest)
        assert ledger.used_bytes == 1000
    assert CountedSizes.num_sums < 5 * 2000 + 10 * 200


def test_each_holder_pays_for_its_pin_and_learns_nothing_of_others() -> None:
    ledger = Ledger(10)
    ledger.pin("a", 4, "acme")
    ledger.pin("a", 4, "acme")  # the same pin again
    ledger.pin("a", 4, "labs")
    refusals = []
    for digest in ("a", "b"):  # weights that others have pinned, and weights that nobody has
        with pytest.raises(PinBudgetExceeded) as caught:
            ledger.pin(digest, 4, "other")
        refusals.append(str(caught.value))
    assert refusals[0] == refusals[1] and "8" not in refusals[0]
    assert ledger.reserve("a", (4,))
    ledger.commit("a")
    ledger.unpin("a", "acme")
    ledger.unpin("a", "nobody")
    assert not ledger.reserve("b", (10,)), "labs still has it pinned"
    ledger.unpin("a", "labs")
    assert ledger.reserve("b", (10,))
