"""Names in order, and the nearest ones to a mistyped one at a cost that does not grow with their number."""

from __future__ import annotations

import pytest
from hypothesis import given, settings, strategies as st

from control_plane.registry import name_index
from control_plane.registry.name_index import NameIndex, edit_distance, nearest


def plain_distance(left: str, right: str) -> int:
    """The definition, by the whole table."""
    row = list(range(len(right) + 1))
    for i, x in enumerate(left, 1):
        diagonal, row[0] = row[0], i
        for j, y in enumerate(right, 1):
            diagonal, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, diagonal + (x != y))
    return row[-1]


@given(left=st.text("ab-", max_size=70), right=st.text("ab-", max_size=70))
@settings(max_examples=300)
def test_edit_distance_is_that_of_the_definition(left: str, right: str) -> None:
    assert edit_distance(left, right) == plain_distance(left, right)


@pytest.mark.parametrize(
    "typo",
    ["customer-suport-v1", "kustomer-support-v1", "customer-support-v2", "cutsomer-support-v1", "customersupport-v1"],
)
def test_one_typo_anywhere_finds_the_name_among_many(typo: str) -> None:
    names = [f"{kind}-{number:05d}" for kind in ("customer", "support", "kitchen") for number in range(5000)]
    assert nearest([NameIndex([*names, "customer-support-v1"])], typo)[0] == "customer-support-v1"


@pytest.mark.parametrize("typo", ["plian", "lpain", "plaim", "plan"])
def test_a_typo_in_a_short_name_finds_it(typo: str) -> None:
    assert nearest([NameIndex(["plain", "other", "base"])], typo) == ["plain"]


def test_a_name_unlike_all_others_has_no_nearest_one() -> None:
    index = NameIndex(f"adapter-{number:06d}" for number in range(100_000))
    assert nearest([index], "nobody") == [] == nearest([NameIndex()], "nobody")


@pytest.mark.parametrize("name", ["nobody", "adapter-O12345", "a" * 63])
def test_an_unknown_name_is_compared_with_a_few_candidates(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A client that requests an unknown name again and again must not keep the event loop busy with suggestions."""
    compared: list[str] = []

    def counted(left: str, right: str) -> int:
        compared.append(right)
        return plain_distance(left, right)

    monkeypatch.setattr(name_index, "edit_distance", counted)
    index = NameIndex([f"adapter-{number:06d}" for number in range(50_000)] + ["a" * length for length in range(1, 63)])
    nearest([index, NameIndex(["b", "adapter-O12346"])], name)
    assert len(compared) <= 6
