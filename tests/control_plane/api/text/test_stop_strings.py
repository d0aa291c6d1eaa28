"""Stop strings cut exactly, whatever the pieces."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from control_plane.api.text.stop_strings import StopMatcher


def run(stops: list[str], pieces: list[str]) -> tuple[str, str | None]:
    matcher = StopMatcher(stops)
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
@settings(max_examples=500, deadline=None, derandomize=True)
def test_pieces_do_not_matter(stops: list[str], pieces: list[str]) -> None:
    assert run(stops, pieces) == plain(stops, "".join(pieces))


@pytest.mark.parametrize(
    ("pieces", "delivered"),
    [(["ab", "c"], ["", "abc"]), (["xab", "ab", "d"], ["x", "ab", ""]), (["END", "x"], ["END", "x"])],
)
def test_only_what_may_become_a_stop_string_is_held(pieces: list[str], delivered: list[str]) -> None:
    matcher = StopMatcher(["abd"])
    assert [matcher.push(piece) for piece in pieces] == delivered


def test_nothing_comes_after_a_match() -> None:
    matcher = StopMatcher(["b"])
    assert [matcher.push("ab"), matcher.push("c"), matcher.finish(), matcher.matched] == ["a", "", "", "b"]
