"""Deadlines of live requests, the earliest first. Reads no clock: the time is an argument."""

from __future__ import annotations

import heapq

from control_plane.scheduler.types import RequestId


class Deadlines:
    """A heap of deadlines; requests that end otherwise are forgotten lazily."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, RequestId]] = []

    def add(self, deadline_s: float, request_id: RequestId) -> None:
        """Watch a request."""
        heapq.heappush(self._heap, (deadline_s, request_id))

    def pop_due(self, now_s: float) -> list[RequestId]:
        """Requests whose deadline is reached, live or not, each once."""
        due: list[RequestId] = []
        while self._heap and self._heap[0][0] <= now_s:
            due.append(heapq.heappop(self._heap)[1])
        return due

    def keep_only(self, live: set[RequestId]) -> None:
        """Drop the deadlines of requests that ended."""
        self._heap = [entry for entry in self._heap if entry[1] in live]
        heapq.heapify(self._heap)

    def __len__(self) -> int:
        return len(self._heap)
