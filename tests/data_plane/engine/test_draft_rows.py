"""One row that may draft: what it drafts, how often its drafts are right, when it pauses. No engine."""

from __future__ import annotations

import random

import pytest

from data_plane.engine.speculative.draft_row import FIRST_PAUSE, DraftRow
from tests.data_plane.engine.planner import array

LOOP = [7, 8, 9, 10, 11] * 4


def test_drafts_that_no_pass_verified_are_compared_with_what_came() -> None:
    row = DraftRow(array(LOOP), len(LOOP))
    first = row.share
    row.tried = row.num_tokens, [7, 8, 9]
    for token in (7, 8):
        row.append(token)
        row.compare_tried()
        assert (row.share, row.num_measured) == (first, 0), "the last token in the drafts' place is not known"
    row.append(9)
    row.compare_tried()
    assert row.share > first and row.num_measured == 3
    row.compare_tried()
    assert row.num_measured == 3, "drafts count once"
    good = row.share
    row.tried = row.num_tokens, [10, 2, 7]
    for token in (10, 11, 7):
        row.append(token)
    row.compare_tried()
    assert row.num_measured == 5 and row.share < good, "the third draft says nothing"


def test_rows_whose_drafts_are_all_right_are_known_after_few_passes() -> None:
    """64 rows finish a plan together only if each is sure to: shares of 0.98 would leave one behind in most plans."""
    row = DraftRow(array(LOOP), len(LOOP))
    for _ in range(5):
        row.note_verified(3, 3)
    assert 1 - row.share ** (3 * 64) < 0.5


def test_the_share_of_mixed_drafts_is_that_of_single_drafts() -> None:
    """Of drafts that are right three times in four, whatever their length."""
    rng = random.Random(1)
    shares = []
    for _ in range(400):
        row = DraftRow(array(LOOP), len(LOOP))
        for _ in range(20):
            right = [rng.random() < 0.75 for _ in range(3)]
            row.note_verified(3 if all(right) else right.index(False), 3)
        shares.append(row.share)
    assert sum(shares) / len(shares) == pytest.approx(0.75, abs=0.03)


def test_a_row_whose_drafts_are_rejected_stops_and_tries_again() -> None:
    row = DraftRow(array(LOOP), len(LOOP))
    assert row.look_up()[:3] == [7, 8, 9]
    num_passes = 0
    while row.pause == 0:
        row.note_verified(0, 3)
        num_passes += 1
    assert 2 <= num_passes <= 8 and row.look_up() == []
    for token in range(FIRST_PAUSE):
        row.append(LOOP[token % 5])
    assert row.look_up()
    row.note_verified(0, 3)
    row.note_verified(0, 3)
    assert row.pause == 2 * FIRST_PAUSE, "the next pause is longer"


@pytest.mark.parametrize(
    ("tokens", "draft"),
    [
        ([1, 2, 3, 4, 1, 2, 3], [4, 1, 2, 3]),  # a loop goes on
        ([1, 2, 3, 9, 5, 2, 3, 8, 1, 2, 3], [9, 5]),  # three tokens say more than two
        ([5, 2, 3, 8, 6, 2, 3], [8, 6]),
        ([1, 2, 3], []),
        ([3], []),
    ],
)
def test_a_draft_is_what_followed_the_longest_match(tokens: list[int], draft: list[int]) -> None:
    assert DraftRow(array(tokens), len(tokens)).look_up()[: len(draft) or None] == draft
