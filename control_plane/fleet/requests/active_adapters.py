"""Which adapters unfinished requests use."""

from __future__ import annotations

import heapq
from dataclasses import dataclass

from control_plane.fleet.requests.unfinished import UnfinishedJobs
from control_plane.fleet.workers.sessions import SessionTable


@dataclass(frozen=True, slots=True)
class AdapterLoad:
    """Unfinished requests of one adapter."""

    digest: str  # empty: the base model
    num_running: int
    num_waiting: int

    @property
    def num_requests(self) -> int:
        """All of them."""
        return self.num_running + self.num_waiting


class ActiveAdapters:
    """Only reads `sessions` and `jobs`."""

    def __init__(self, sessions: SessionTable, jobs: UnfinishedJobs) -> None:
        self._sessions = sessions.by_id
        self._jobs = jobs.by_id

    def busiest(self, max_adapters: int) -> tuple[list[AdapterLoad], int]:
        """The adapters that most unfinished requests use, busiest first, and how many others there are."""
        running = set().union(*(session.steps.running_request_ids for session in self._sessions.values()))
        counts: dict[str, list[int]] = {}  # digest -> running, waiting
        for job in self._jobs.values():
            is_waiting = job.request.request_id not in running
            for digest in {ref.digest for ref in job.request.adapters} or {""}:
                counts.setdefault(digest, [0, 0])[is_waiting] += 1
        loads = [AdapterLoad(digest, *numbers) for digest, numbers in counts.items()]
        busiest = heapq.nsmallest(max_adapters, loads, key=lambda load: (-load.num_requests, load.digest))
        return busiest, len(loads) - len(busiest)
