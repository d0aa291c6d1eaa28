"""What is known of every name at every moment, and the judge of each stream."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field


@dataclass
class Name:
    """One adapter name. Changed by one thread at a time, which holds `turn`."""

    turn: threading.Lock = field(default_factory=threading.Lock)
    digests: set[str] = field(default_factory=set)  # that it ever had
    active: str = ""  # acknowledged; empty: there is no such adapter
    num_changes: int = 0
    is_changing: bool = False


@dataclass(frozen=True)
class View:
    """A name at the moment that a request began."""

    name: str
    active: str
    num_changes: int
    is_changing: bool


class Ledger:
    """All names, and what went wrong."""

    def __init__(self, names: list[str]) -> None:
        self.names = {name: Name() for name in names}
        self.counts: Counter[str] = Counter()
        self.problems: list[str] = []
        self._lock = threading.Lock()

    @contextmanager
    def change(self, name: str) -> Iterator[Name]:
        """The name, which nobody else changes meanwhile."""
        entry = self.names[name]
        with entry.turn:
            with self._lock:
                entry.is_changing = True
                entry.num_changes += 1
            try:
                yield entry
            finally:
                with self._lock:
                    entry.is_changing = False

    def look(self, name: str) -> View:
        """Before a request is sent."""
        entry = self.names[name]
        with self._lock:
            return View(name, entry.active, entry.num_changes, entry.is_changing)

    def count(self, what: str) -> None:
        with self._lock:
            self.counts[what] += 1

    def blame(self, what: str) -> None:
        """Something that may not be."""
        with self._lock:
            self.problems.append(what)

    def check_version(self, view: View, digest: str) -> None:
        """The version that a request of the name got: the active one, if nothing changed since it began."""
        entry = self.names[view.name]
        with self._lock:
            is_quiet = not view.is_changing and entry.num_changes == view.num_changes
            known = set(entry.digests)
        if digest not in known:
            self.blame(f"{view.name}: version {digest[:12]!r}, which it never had")
        elif is_quiet and digest != view.active:
            self.blame(f"{view.name}: version {digest[:12]} where {view.active[:12]} is active")

    def check_missing(self, view: View) -> None:
        """A request was refused because there is no such adapter."""
        entry = self.names[view.name]
        with self._lock:
            is_quiet = not view.is_changing and entry.num_changes == view.num_changes
        if is_quiet and view.active:
            self.blame(f"{view.name}: not found, and {view.active[:12]} is active")
        self.count("not found")

    def check_tokens(self, what: str, found: list[int], due: tuple[int, ...]) -> None:
        """The tokens of a stream that ended."""
        self.count("streams")
        if tuple(found) != due[: len(found)] or len(found) != len(due):
            self.blame(f"{what}: tokens {found} where {list(due)} are due")

    def check_values(self, what: str, found: Sequence[float], due: Sequence[float], tolerance: float) -> None:
        """The numbers of an embedding or of classes."""
        if len(found) != len(due) or max(abs(one - other) for one, other in zip(found, due, strict=True)) > tolerance:
            self.blame(f"{what}: {list(found)[:4]} where {list(due)[:4]} are due")
