"""Adapter names in order: pages, and the nearest names to a mistyped one, without walking all of them."""

from __future__ import annotations

import bisect
import difflib
from collections.abc import Iterable

_NEIGHBOURS = 16


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

    def page(self, after: str, count: int) -> tuple[list[str], bool]:
        """Up to `count` names that sort after `after`, and whether more follow."""
        start = bisect.bisect_right(self._names, after)
        return self._names[start : start + count], start + count < len(self._names)

    def nearest(self, name: str, count: int = 3) -> list[str]:
        """Names that look like `name`, best first."""
        candidates = set(_around(self._names, name))
        candidates.update(key[::-1] for key in _around(self._reversed, name[::-1]))
        return difflib.get_close_matches(name, sorted(candidates), n=count, cutoff=0.6)


def _around(names: list[str], key: str) -> list[str]:
    position = bisect.bisect_left(names, key)
    return names[max(position - _NEIGHBOURS, 0) : position + _NEIGHBOURS]
