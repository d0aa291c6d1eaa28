"""How much work there is for workers. Autoscalers start and stop workers by it."""

from __future__ import annotations

from dataclasses import dataclass

from control_plane.fleet.placement.dispatcher import Dispatcher
from control_plane.fleet.requests.unfinished import UnfinishedJobs
from control_plane.fleet.worker_waits import WorkerWaits
from control_plane.fleet.workers.sessions import SessionTable


@dataclass(frozen=True, slots=True)
class Workload:
    """The work at one moment."""

    num_requests: int  # accepted and not ended
    num_waiting: int  # of these, requests without a row of a worker
    num_workers: int  # that take requests
    num_rows_requested: int  # rows that are held, and one for each request that waits
    rows_per_worker: float  # of the attached workers, or of those that were attached last; 0: none ever was
    full_workers: float  # workers whose KV blocks would be those that requests hold, a count

    def needed_workers(self, target: float) -> float:
        """How many workers the requests need, each filled to this part: by rows or by KV blocks, whichever are more.

        At least 1 while there is a request, and 0 without any.
        """
        if not self.num_requests:
            return 0.0
        by_rows = self.num_rows_requested / self.rows_per_worker if self.rows_per_worker else 0.0
        return max(max(by_rows, self.full_workers) / target, 1.0)


class FleetWorkload:
    """Only reads the parts of the fleet."""

    def __init__(
        self, sessions: SessionTable, jobs: UnfinishedJobs, dispatcher: Dispatcher, waits: WorkerWaits
    ) -> None:
        self._sessions = sessions
        self._jobs = jobs
        self._dispatcher = dispatcher
        self._waits = waits
        self._rows_per_worker = 0.0  # as it was when a worker was attached

    @property
    def is_active(self) -> bool:
        """Whether a request is unfinished, so that a worker is needed."""
        return bool(self._jobs.by_id)

    @property
    def is_served(self) -> bool:
        """Whether requests may be sent: a worker takes them, or they wait until one is started for them."""
        return bool(self._sessions.taking) or self._waits.starts_workers

    def now(self) -> Workload:
        """The work at this moment."""
        taking = list(self._sessions.taking.values())
        stats = [session.scheduler.stats() for session in self._sessions.by_id.values()]
        if taking:
            self._rows_per_worker = sum(session.scheduler.limits.max_rows for session in taking) / len(taking)
        num_unplaced = len(self._dispatcher.waiting)
        return Workload(
            num_requests=len(self._jobs.by_id),
            num_waiting=num_unplaced + sum(each.num_waiting for each in stats),
            num_workers=len(taking),
            num_rows_requested=num_unplaced + sum(each.num_rows_requested for each in stats),
            rows_per_worker=self._rows_per_worker,
            full_workers=sum(each.num_blocks_held / each.num_blocks for each in stats),
        )
