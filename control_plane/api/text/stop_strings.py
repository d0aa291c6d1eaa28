"""Finds stop strings in text that arrives in pieces.

What could still become a stop string is held back. The result depends on the text alone, not on its pieces: the
stop string that is complete first wins, of several that end together the longest. A character costs the same whatever
the stop strings and the text are, but for their number.
"""

from __future__ import annotations

from collections.abc import Sequence


class StopStrings:
    """Stop strings made ready for matching; shared by the matchers of one request."""

    def __init__(self, stops: Sequence[str]) -> None:
        self.stops = tuple(dict.fromkeys(stops))
        # By stop string: how many characters of it still match when the one after k matched ones does not
        # (Knuth-Morris-Pratt).
        self.fallbacks = tuple(_fallbacks(stop) for stop in self.stops)
        self.first_chars = frozenset(stop[0] for stop in self.stops)


class StopMatcher:
    """State of one sequence. After `matched` is set, nothing comes out any more."""

    def __init__(self, stops: StopStrings) -> None:
        self._stops = stops
        # By stop string: the length of the longest suffix of the text so far that is a proper prefix of it.
        self._num_matched = [0] * len(stops.stops)
        # Invariant: the longest of those suffixes.
        self._held = ""
        self.matched: str | None = None

    def push(self, text: str) -> str:
        """The text that is certain now, the stop string and what follows it cut off."""
        if self.matched is not None:
            return ""
        if not self._held and self._stops.first_chars.isdisjoint(text):
            return text
        buffer = self._held + text
        end = len(text)  # nothing after the first match matters
        for index, stop in enumerate(self._stops.stops):
            num_read = self._advance(index, text[:end])
            # Read to the end without a match, or matched earlier than the others, or together with them and longer.
            if self._num_matched[index] == len(stop) and (
                self.matched is None or num_read < end or len(stop) > len(self.matched)
            ):
                self.matched, end = stop, num_read
        if self.matched is not None:
            num_before, self._held = len(buffer) - len(text) + end - len(self.matched), ""
            return buffer[:num_before]
        num_certain = len(buffer) - max(self._num_matched)
        self._held = buffer[num_certain:]
        return buffer[:num_certain]

    def finish(self) -> str:
        """What was held back and did not become a stop string."""
        held, self._held = self._held, ""
        return held

    def _advance(self, index: int, text: str) -> int:
        """Match one stop string on; how many characters were read until it was complete, or all."""
        stop, fallbacks, num_matched = self._stops.stops[index], self._stops.fallbacks[index], self._num_matched[index]
        num_read = 0
        for char in text:
            while num_matched and stop[num_matched] != char:
                num_matched = fallbacks[num_matched]
            num_matched += stop[num_matched] == char
            num_read += 1
            if num_matched == len(stop):
                break
        self._num_matched[index] = num_matched
        return num_read


def _fallbacks(stop: str) -> list[int]:
    """fallbacks[k]: the length of the longest proper suffix of stop[:k] that is a prefix of the stop string."""
    fallbacks, length = [0, 0], 0
    for char in stop[1:]:
        while length and stop[length] != char:
            length = fallbacks[length]
        length += stop[length] == char
        fallbacks.append(length)
    return fallbacks
