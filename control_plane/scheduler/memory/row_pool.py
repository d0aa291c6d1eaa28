"""Rows of the worker's state: which are taken, and which the next plan reports as freed.

A freed row may be taken again at once: the plan that gives it to another request, or an earlier one, frees it first.
"""

from __future__ import annotations

import heapq


class RowPool:
    """Rows, lowest first."""

    def __init__(self, num_rows: int) -> None:
        self.num_rows = num_rows
        self._num_taken = 0  # rows below it were taken at some time
        self._free: list[int] = []  # of those; a heap
        self._unsent: list[int] = []  # freed since the last plan

    @property
    def num_free(self) -> int:
        """Rows that can be taken."""
        return len(self._free) + self.num_rows - self._num_taken

    def take(self) -> int:
        """The lowest free row; there must be one."""
        if self._free:
            return heapq.heappop(self._free)
        assert self._num_taken < self.num_rows, f"all of {self.num_rows} rows are taken"
        self._num_taken += 1
        return self._num_taken - 1

    def give_back(self, row: int) -> None:
        """The row's request left it."""
        heapq.heappush(self._free, row)
        self._unsent.append(row)

    def restart(self, row: int) -> None:
        """The row stays taken, but the worker is to forget its request: another one of the same holder follows."""
        self._unsent.append(row)

    def give_back_unused(self, row: int) -> None:
        """Give back a row that the worker does not know."""
        heapq.heappush(self._free, row)

    def take_freed(self) -> list[int]:
        """Rows freed since the last call, for the plan that is made."""
        freed, self._unsent = self._unsent, []
        return freed

    def check_invariants(self, held_rows: list[int]) -> None:
        """Raise AssertionError unless free and held rows are all rows, each once."""
        assert sorted(self._free + held_rows) == list(range(self._num_taken)), "a row is lost or used twice"
        assert len(set(self._unsent)) == len(self._unsent), "a row is freed twice in one plan"
