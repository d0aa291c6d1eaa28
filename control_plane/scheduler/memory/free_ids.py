"""Free ids of one kind (blocks, host blocks, slots). Memory is taken only for ids that were ever held.

So the number of ids that a worker reports costs nothing until they are used.
"""

from __future__ import annotations

from collections.abc import Iterator


class FreeIds:
    """The ids from 0 to num_ids - 1 that are free: the last given back is taken first, else the lowest never taken."""

    def __init__(self, num_ids: int) -> None:
        self._num_ids = num_ids
        self._num_taken = 0  # ids below it were taken at some time
        self._given_back: list[int] = []  # a stack

    def __len__(self) -> int:
        return len(self._given_back) + self._num_ids - self._num_taken

    def __iter__(self) -> Iterator[int]:
        yield from self._given_back
        yield from range(self._num_taken, self._num_ids)

    def take(self) -> int:
        """A free id; there must be one. Those that are taken for the first time come in order, without a gap."""
        if self._given_back:
            return self._given_back.pop()
        assert self._num_taken < self._num_ids, f"all of {self._num_ids} ids are taken"
        self._num_taken += 1
        return self._num_taken - 1

    def give_back(self, taken_id: int) -> None:
        """An id that was taken is free again."""
        self._given_back.append(taken_id)
