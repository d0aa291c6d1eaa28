"""Finds stop strings in text that arrives in pieces.

What could still become a stop string is held back. The result depends on the text alone, not on its pieces: the
stop string that is complete first wins, of several that end together the longest.
"""

from __future__ import annotations

from collections.abc import Sequence


class StopMatcher:
    """State of one sequence. After `matched` is set, nothing comes out any more."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        # Invariant: the longest suffix of the text so far that is a proper prefix of a stop string.
        self._held = ""
        self.matched: str | None = None

    def push(self, text: str) -> str:
        """The text that is certain now, the stop string and what follows it cut off."""
        if self.matched is not None:
            return ""
        buffer = self._held + text
        if not self._stops or not text:
            return buffer if not self._stops else ""
        # (end, start, stop): the smallest end wins, then the smallest start. A match starts in what is held or new.
        found = [(start + len(stop), start, stop) for stop in self._stops if (start := buffer.find(stop)) >= 0]
        if found:
            _, start, self.matched = min(found)
            self._held = ""
            return buffer[:start]
        num_held = self._num_to_hold(buffer)
        self._held = buffer[len(buffer) - num_held :]
        return buffer[: len(buffer) - num_held]

    def finish(self) -> str:
        """What was held back and did not become a stop string."""
        held, self._held = self._held, ""
        return held

    def _num_to_hold(self, buffer: str) -> int:
        best = 0
        for stop in self._stops:
            for length in range(min(len(stop) - 1, len(buffer)), best, -1):
                if buffer.endswith(stop[:length]):
                    best = length
                    break
        return best
