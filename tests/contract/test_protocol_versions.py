"""Which version of the plan stream a control plane and a worker of different releases speak."""

from __future__ import annotations

import pytest

import contract
from contract import OLDEST_PROTOCOL, PROTOCOL, common_protocol


@pytest.mark.parametrize(
    ("lowest", "highest", "common"),
    [
        (4, 5, 5),  # the same release
        (3, 4, 4),  # a worker of the release before
        (5, 6, 5),  # a worker of the release after
        (0, 2**32 - 1, 5),
        (4, 4, 4),
        (2, 3, None),  # two releases apart
        (6, 7, None),
        (5, 4, None),  # no range
        (0, 0, None),
    ],
)
def test_the_newest_version_that_both_speak_is_chosen(
    monkeypatch: pytest.MonkeyPatch, lowest: int, highest: int, common: int | None
) -> None:
    monkeypatch.setattr(contract, "PROTOCOL", 5)
    monkeypatch.setattr(contract, "OLDEST_PROTOCOL", 4)
    assert common_protocol(lowest, highest) == common


def test_at_most_the_release_before_is_spoken() -> None:
    assert PROTOCOL - 1 <= OLDEST_PROTOCOL <= PROTOCOL
