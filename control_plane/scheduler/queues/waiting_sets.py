"""Which sets of adapters requests wait with: the names under which the queue keeps them, by adapter."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection

from control_plane.scheduler.types import SET_SEPARATOR, digests_of


class WaitingSets:
    """The names of the sets that requests in the queue have. A digest alone is not a set, and is ignored."""

    def __init__(self) -> None:
        self._by_digest: dict[str, Counter[str]] = {}  # requests by the set's name; no zeros, none empty

    def add(self, name: str | None) -> None:
        """A request with this adapter or set joins the queue."""
        if name is not None and SET_SEPARATOR in name:
            for digest in digests_of(name):
                self._by_digest.setdefault(digest, Counter())[name] += 1

    def remove(self, name: str | None) -> None:
        """A request with this set of adapters leaves the queue."""
        if name is None or SET_SEPARATOR not in name:
            return
        for digest in digests_of(name):
            names = self._by_digest[digest]
            names[name] -= 1
            if not names[name]:
                del names[name]
            if not names:
                del self._by_digest[digest]

    def with_adapter(self, digest: str | None) -> Collection[str]:
        """Names of the sets that have this adapter."""
        return () if digest is None else self._by_digest.get(digest, ())
