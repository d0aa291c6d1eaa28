"""The latest changes of all adapters, in order. Bounded: a reader that fell behind has to begin with a snapshot."""

from __future__ import annotations

import asyncio
from collections import deque
from dataclasses import dataclass

from control_plane.registry.records import AdapterRecord

MAX_CHANGES = 4096


@dataclass(frozen=True, slots=True)
class Change:
    """One change of one name. None: the name did not exist, or does not any more."""

    before: AdapterRecord | None
    after: AdapterRecord | None


class ChangeLog:
    """Changes by sequence number, from 1. Readers have no part of it: each keeps the number that it has read up to."""

    def __init__(self, *, max_changes: int = MAX_CHANGES) -> None:
        self._changes: deque[Change] = deque(maxlen=max_changes)
        self.last = 0  # number of the latest change
        self._news = asyncio.Event()

    def add(self, before: AdapterRecord | None, after: AdapterRecord | None) -> None:
        """Take a change in; wakes every reader that waits."""
        self._changes.append(Change(before, after))
        self.last += 1
        self._news.set()
        self._news = asyncio.Event()

    def after(self, sequence: int) -> list[Change] | None:
        """The changes after this number, in order. None: some of them are forgotten."""
        num_missing = self.last - sequence
        if num_missing > len(self._changes):
            return None
        return [self._changes[index] for index in range(len(self._changes) - num_missing, len(self._changes))]

    @property
    def news(self) -> asyncio.Event:
        """Set with the next change."""
        return self._news
