"""The ledger's arithmetic, by random walks."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from control_plane.errors import PinBudgetExceeded
from control_plane.host_cache.ledger import Ledger

_STEPS = st.lists(
    st.tuples(
        st.sampled_from(["reserve", "commit", "release", "remove", "touch", "pin", "unpin", "scan"]),
        st.integers(0, 7),
        st.integers(1, 60),
    ),
    max_size=60,
)


@given(_STEPS)
def test_the_budget_holds_and_pins_stay(steps: list[tuple[str, int, int]]) -> None:
    ledger = Ledger(100)
    reserved: set[str] = set()
    pinned: set[str] = set()
    for action, number, size in steps:
        digest = str(number)
        held_pins = {pin for pin in pinned if pin in ledger}
        if action == "reserve":
            victims = ledger.reserve(digest, (1, size))
            if victims is not None:
                assert not {victim for victim, _ in victims} & pinned
                reserved.add(digest)
                held_pins.discard(digest)
        elif action == "commit" and digest in reserved:
            ledger.commit(digest)
            reserved.discard(digest)
        elif action == "release":
            ledger.release(digest)
            reserved.discard(digest)
        elif action == "remove":
            ledger.remove(digest)
            held_pins.discard(digest)
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
        assert ledger.used_bytes <= 100
        assert all(pin in ledger for pin in held_pins)


def test_the_oldest_goes_first_and_no_more_than_needed() -> None:
    ledger = Ledger(10)
    for digest in "abc":
        assert ledger.reserve(digest, (3,)) == []
        ledger.commit(digest)
    ledger.touch("a")
    assert ledger.reserve("d", (4,)) == [("b", (3,))]


def test_what_cannot_fit_evicts_nothing() -> None:
    ledger = Ledger(10)
    ledger.reserve("a", (5,))
    ledger.commit("a")
    assert ledger.reserve("b", (11,)) is None
    assert "a" in ledger
