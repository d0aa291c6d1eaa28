"""Units are taken from the smallest run that holds them, in few pieces where none does, and no unit twice."""

from __future__ import annotations

import random

import pytest

from data_plane.adapters.free_runs import FreeRuns


def runs_of(free: FreeRuns, *taken: tuple[int, int]) -> FreeRuns:
    """All units taken, and these given back."""
    assert free.take(40) == 0
    for start, length in taken:
        free.give_back(start, length)
    return free


def test_the_smallest_run_that_holds_them_is_taken() -> None:
    free = runs_of(FreeRuns(40), (0, 20), (21, 5), (30, 10))
    assert [free.take(4), free.take(10), free.take(21)] == [21, 30, None]
    assert list(free) == [(0, 20), (25, 1)]


def test_pieces_are_few() -> None:
    free = runs_of(FreeRuns(40), (0, 3), (5, 9), (20, 2), (30, 9))
    assert free.take_pieces(19) == [(5, 9), (30, 9), (0, 1)]
    assert list(free) == [(1, 2), (20, 2)]


def test_runs_that_touch_become_one() -> None:
    free = runs_of(FreeRuns(40), (0, 10), (20, 10), (10, 10))
    assert list(free) == [(0, 30)]
    free.give_back(35, 0)
    assert list(free) == [(0, 30)]


@pytest.mark.parametrize("given", [(5, 1), (9, 4), (0, 40)])
def test_no_unit_is_given_back_twice(given: tuple[int, int]) -> None:
    free = runs_of(FreeRuns(40), (0, 10))
    with pytest.raises(AssertionError, match="is given back twice"):
        free.give_back(*given)


def test_nothing_is_lost() -> None:
    rng, free, held = random.Random(7), FreeRuns(64), list[tuple[int, int]]()
    for _ in range(2000):
        length = rng.randrange(1, 9)
        start = free.take(length)
        if start is not None:
            held.append((start, length))
        elif sum(count for _, count in free) >= length:
            held += free.take_pieces(length)
        while held and rng.random() < 0.5:
            free.give_back(*held.pop(rng.randrange(len(held))))
        units = [unit for start, count in (*free, *held) for unit in range(start, start + count)]
        assert sorted(units) == list(range(64))
