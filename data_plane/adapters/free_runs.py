"""Which of some numbered units are free: pages of the arena, bytes of the memory for chunks."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator


class FreeRuns:
    """Units 0 to `num_units` - 1, all free at first, as runs of units that follow one another. Not thread-safe."""

    def __init__(self, num_units: int) -> None:
        # Invariant: (start, length), sorted, no two runs touch, none is empty.
        self._runs: list[tuple[int, int]] = [(0, num_units)] if num_units else []

    def __iter__(self) -> Iterator[tuple[int, int]]:
        """(start, length) of each run, in order."""
        return iter(self._runs)

    def take(self, length: int) -> int | None:
        """The first of `length` units in a row, from the smallest run that holds them; None if none does."""
        fitting = [run for run in self._runs if run[1] >= length]
        if not fitting:
            return None
        run = min(fitting, key=_length)
        self._cut(run, length)
        return run[0]

    def take_pieces(self, length: int) -> list[tuple[int, int]]:
        """(start, length) of pieces that are `length` units together, in few pieces. As many have to be free."""
        pieces: list[tuple[int, int]] = []
        for run in sorted(self._runs, key=_length, reverse=True):
            if length == 0:
                break
            taken = min(run[1], length)
            self._cut(run, taken)
            pieces.append((run[0], taken))
            length -= taken
        return pieces

    def give_back(self, start: int, length: int) -> None:
        """Return units that were taken."""
        if length == 0:
            return
        runs = self._runs
        index = bisect_left(runs, (start, 0))
        if index < len(runs) and runs[index][0] < start + length:
            raise AssertionError(f"unit {runs[index][0]} is given back twice")
        if index and sum(runs[index - 1]) > start:
            raise AssertionError(f"unit {start} is given back twice")
        if index < len(runs) and runs[index][0] == start + length:
            length += runs.pop(index)[1]
        if index and sum(runs[index - 1]) == start:
            previous_start, previous_length = runs.pop(index - 1)
            start, length = previous_start, previous_length + length
        insort(runs, (start, length))

    def _cut(self, run: tuple[int, int], length: int) -> None:
        """Take the first units of a run away."""
        start, whole = run
        index = bisect_left(self._runs, run)
        self._runs[index : index + 1] = [(start + length, whole - length)] if length < whole else []


def _length(run: tuple[int, int]) -> int:
    return run[1]
