"""Stop strings cut exactly, whatever the pieces."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings, strategies as st

from control_plane.api.text.stop_strings import StopMatcher, StopStrings


def run(stops: list[str], pieces: list[str]) -> tuple[str, str | None]:
    matcher = StopMatcher(StopStrings(stops))
    text = "".join(matcher.push(piece) for piece in pieces)
    return text + matcher.finish(), matcher.matched


def plain(stops: list[str], text: str) -> tuple[str, str | None]:
    """The definition: the first position at which a stop string is complete; the longest of those."""
    for end in range(1, len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            longest = max(found, key=len)
            return text[: end - len(longest)], longest
    return text, None


@given(
    stops=st.lists(st.text("ab", min_size=1, max_size=4), max_size=4),
    pieces=st.lists(st.text("abc", max_size=5), max_size=8),
)
@settings(max_examples=500)
def test_pieces_do_not_matter(stops: list[str], pieces: list[str]) -> None:
    assert run(stops, pieces) == plain(stops, "".join(pieces))


@pytest.mark.parametrize(
    ("pieces", "delivered"),
    [(["ab", "c"], ["", "abc"]), (["xab", "ab", "d"], ["x", "ab", ""]), (["END", "x"], ["END", "x"])],
)
def test_only_what_may_become_a_stop_string_is_held(pieces: list[str], delivered: list[str]) -> None:
    matcher = StopMatcher(StopStrings(["abd"]))
    assert [matcher.push(piece) for piece in pieces] == delivered


def test_nothing_comes_after_a_match() -> None:
    matcher = StopMatcher(StopStrings(["b"]))
    assert [matcher.push("ab"), matcher.push("c"), matcher.finish(), matcher.matched] == ["a", "", "", "b"]


def test_matchers_of_one_request_share_the_stop_strings_and_nothing_else() -> None:
    stops = StopStrings(["aab", "aab", "b"])
    first, second = StopMatcher(stops), StopMatcher(stops)
    assert (first.push("xaa"), second.push("a")) == ("x", "")
    assert (first.push("b"), first.matched) == ("", "aab")
    assert (second.push("c"), second.matched) == ("ac", None)


class CountingText(str):
    """Text that counts how many of its characters were compared."""

    num_compared = 0

    def __getitem__(self, key: Any) -> str:
        CountingText.num_compared += 1
        return super().__getitem__(key)


def test_a_character_costs_a_few_comparisons_per_stop_string_however_long_they_are() -> None:
    """Stop strings that nearly match a repeated letter: 125 prefixes of each were compared at every token."""
    nearly = ["a" * 124 + chr(ord("b") + index) + "a" * 125 for index in range(15)]
    stops = StopStrings([CountingText(stop) for stop in [*nearly, "a" * 249 + "z"]])
    matcher = StopMatcher(stops)
    CountingText.num_compared = 0
    assert "".join(matcher.push("a") for _ in range(2000)) == "a" * (2000 - 249)
    assert CountingText.num_compared <= 2000 * 16 * 3
    assert (matcher.push("z"), matcher.matched) == ("", "a" * 249 + "z")
