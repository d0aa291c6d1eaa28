"""Reserved beginnings of adapter names."""

from __future__ import annotations

import pytest

from control_plane.access.name_prefixes import reserve


def test_a_name_is_reserved_by_its_beginning() -> None:
    prefixes = reserve({"acme": ("acme-", "a1."), "labs": ("labs-", "labs-x-"), "none": ()})
    assert prefixes.reserved("acme-poet") == ("acme-", "acme")
    assert prefixes.reserved("a1.x") == ("a1.", "acme")
    assert prefixes.reserved("labs-x-1") == ("labs-", "labs")
    assert prefixes.reserved("acme-") == ("acme-", "acme")
    assert [prefixes.reserved(name) for name in ("acme", "a", "my-acme-poet", "zzz")] == [None] * 4


@pytest.mark.parametrize(
    ("prefixes", "words"),
    [
        ({"acme": ("x-",), "labs": ("x-",)}, "labs.name_prefixes: 'x-' is reserved for acme already"),
        (
            {"acme": ("x-y-",), "labs": ("x-",)},
            "acme.name_prefixes: 'x-y-' begins with 'x-', which is reserved for labs",
        ),
        (
            {"acme": ("x-",), "labs": ("x-y-",)},
            "labs.name_prefixes: 'x-y-' begins with 'x-', which is reserved for acme",
        ),
        ({"acme": ("",)}, "'' is not the beginning of an adapter id"),
        ({"acme": ("Acme-",)}, "'Acme-' is not the beginning of an adapter id"),
        ({"acme": ("-x",)}, "is not the beginning"),
        ({"acme": ("a..b",)}, "is not the beginning"),
        ({"acme": ("a" * 63,)}, "is not the beginning"),
    ],
)
def test_reservations_that_overlap_or_match_no_name_are_refused(
    prefixes: dict[str, tuple[str, ...]], words: str
) -> None:
    with pytest.raises(ValueError, match=words):
        reserve(prefixes)
