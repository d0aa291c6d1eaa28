"""Text from outside as it may stand in the log."""

from __future__ import annotations

import pytest

from control_plane.telemetry import printable


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("plain: ~é中", "plain: ~é中"),
        ("a\nb\r\tc\0", r"a\nb\r\tc\x00"),
        ("\x1b[31m\u2028\u202e\u200b", r"\x1b[31m\u2028\u202e\u200b"),
        ("", ""),
    ],
)
def test_what_does_not_print_is_escaped(text: str, shown: str) -> None:
    assert printable(text) == shown


def test_what_is_long_is_cut_off_and_says_so() -> None:
    assert printable("x" * 300) == "x" * 300
    assert printable("x" * 301) == "x" * 300 + "… (301 characters)"
    assert printable("\n" * 70, 63) == r"\n" * 63 + "… (70 characters)"
