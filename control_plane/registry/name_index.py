"""Adapter names in order: pages, and the nearest names to a mistyped one, without walking all of them.

A look for nearest names costs the same however many there are: it runs on the event loop, for every unknown name that
a request needs.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Iterable, Sequence

_NEIGHBOURS = 8  # candidates on each side of a name's place in each of the two orders
_MAX_COMPARED = 6  # candidates whose edit distance is computed, about 25 us each


class NameIndex:
    """A sorted set of names. Also sorted by the reversed name, so that a typo at the front finds its neighbours."""

    def __init__(self, names: Iterable[str] = ()) -> None:
        # Invariant: both lists hold the same names, each once.
        self._names: list[str] = sorted(set(names))
        self._reversed: list[str] = sorted(name[::-1] for name in self._names)

    def __len__(self) -> int:
        return len(self._names)

    def add(self, name: str) -> None:
        """Add a name; a known one changes nothing."""
        for names, key in ((self._names, name), (self._reversed, name[::-1])):
            position = bisect.bisect_left(names, key)
            if position == len(names) or names[position] != key:
                names.insert(position, key)

    def remove(self, name: str) -> None:
        """Remove a name; an unknown one changes nothing."""
        for names, key in ((self._names, name), (self._reversed, name[::-1])):
            position = bisect.bisect_left(names, key)
            if position < len(names) and names[position] == key:
                names.pop(position)

    def page(self, after: str, count: int, *, prefix: str = "") -> list[str]:
        """Up to `count` names that begin with `prefix` and sort after `after`, in order."""
        start = bisect.bisect_right(self._names, after)
        if prefix > after:
            start = bisect.bisect_left(self._names, prefix)
        end = min(start + count, bisect.bisect_left(self._names, end_of(prefix))) if prefix else start + count
        return self._names[start:end]

    def around(self, name: str) -> list[str]:
        """Names that share much with the beginning or the end of `name`, a few of each."""
        return _around(self._names, name) + [key[::-1] for key in _around(self._reversed, name[::-1])]


def end_of(prefix: str) -> str:
    """Sorts after every name that begins with `prefix`, and before the names that sort after those."""
    return prefix + "\x7f"  # after every character of a name


def nearest(
    indexes: Sequence[NameIndex], name: str, *, is_candidate: Callable[[str], bool] = lambda _: True, count: int = 3
) -> list[str]:
    """Names that look like `name`, best first: at most every third character differs, or two are swapped."""
    backwards = name[::-1]
    candidates = {candidate for index in indexes for candidate in index.around(name) if is_candidate(candidate)}
    # What the candidates have in common with the name at its two ends, which is nearly all for one typo.
    shared = {
        candidate: _num_alike(name, candidate) + _num_alike(backwards, candidate[::-1]) for candidate in candidates
    }
    likely = sorted(shared, key=lambda candidate: (-shared[candidate], candidate))[:_MAX_COMPARED]
    distances = {candidate: edit_distance(name, candidate) for candidate in likely}
    near = [candidate for candidate in likely if _is_near(name, candidate, distances[candidate])]
    return sorted(near, key=lambda candidate: (distances[candidate], candidate))[:count]


def _is_near(name: str, candidate: str, distance: int) -> bool:
    # Two swapped characters count as two edits, which is too many for a short name.
    is_swap = distance == 2 and sorted(name) == sorted(candidate)
    return is_swap or 3 * distance <= max(len(name), len(candidate))


def _around(names: list[str], key: str) -> list[str]:
    position = bisect.bisect_left(names, key)
    return names[max(position - _NEIGHBOURS, 0) : position + _NEIGHBOURS]


def _num_alike(left: str, right: str) -> int:
    """Length of what both begin with."""
    return next(
        (index for index, pair in enumerate(zip(left, right, strict=False)) if pair[0] != pair[1]),
        min(len(left), len(right)),
    )


def edit_distance(left: str, right: str) -> int:
    """Characters to insert, delete or replace. Myers' algorithm: one column of the table is two integers of bits."""
    if not left:
        return len(right)
    mask = (1 << len(left)) - 1
    last = 1 << (len(left) - 1)
    positions: dict[str, int] = {}
    for index, char in enumerate(left):
        positions[char] = positions.get(char, 0) | 1 << index
    # Bit i: the value in row i + 1 is one more (`rises`) or one less (`falls`) than that in row i.
    rises, falls, distance = mask, 0, len(left)
    for char in right:
        matches = positions.get(char, 0)
        diagonal = (((matches & rises) + rises) ^ rises) | matches | falls
        up = falls | ~(diagonal | rises)  # the column's value rises from the column before
        down = rises & diagonal
        distance += bool(up & last) - bool(down & last)
        up = up << 1 | 1
        rises = (down << 1 | ~(diagonal | up)) & mask
        falls = up & diagonal & mask
    return distance
