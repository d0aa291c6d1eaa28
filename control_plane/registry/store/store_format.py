"""How a store is laid out, as a number in the store: a newer layout is refused before anything is changed."""

from __future__ import annotations

import json

from control_plane.registry.store.store import Store, replace

# 0: no number; records may hold their versions. 1: versions have documents of their own.
STORE_FORMAT = 1
_KEY = "format.json"


class WrongStoreFormat(ValueError):
    """The store is laid out in a way that this version of Motet does not know."""


class StoreFormat:
    """The number of one store."""

    def __init__(self, store: Store) -> None:
        self._store = store

    def check(self) -> int:
        """The store's format. Raises WrongStoreFormat if a newer version of Motet wrote it."""
        try:
            raw, _ = self._store.get(_KEY)
        except FileNotFoundError:
            return 0
        try:
            found = json.loads(raw)["format"]
        except (ValueError, KeyError, TypeError, RecursionError):
            found = None
        if type(found) is not int or found < 0:
            raise WrongStoreFormat(
                f"the store's {_KEY} cannot be read: {raw[:80]!r}; bring back the file from a copy of the store"
            )
        if found > STORE_FORMAT:
            raise WrongStoreFormat(
                f"the store has format {found}, and this version of Motet knows formats up to {STORE_FORMAT}; "
                "start a newer version"
            )
        return found

    def mark(self) -> None:
        """Note that everything in the store is in the present format."""
        if self.check() != STORE_FORMAT:
            replace(self._store, _KEY, json.dumps({"format": STORE_FORMAT}).encode())
