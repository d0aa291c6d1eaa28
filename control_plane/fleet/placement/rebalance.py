"""Moves requests that wait at a busy worker to workers that have nothing waiting.

At every tick, requests that have not run and wait for a row at one worker, while another worker has nothing waiting,
are priced once more on both, the latest arrivals first. A request moves if that is clearly faster. So a worker that
attaches, or that finished its work, takes over from those that are behind.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import islice

from control_plane.fleet.placement import placement
from control_plane.fleet.placement.dispatcher import Dispatcher
from control_plane.fleet.placement.isolation import PoisonIsolation
from control_plane.fleet.placement.shortlist import Shortlist
from control_plane.fleet.requests.deaths import is_suspect
from control_plane.fleet.requests.jobs import Job
from control_plane.fleet.requests.unfinished import UnfinishedJobs
from control_plane.fleet.settings import PlacementCosts
from control_plane.fleet.workers.session import WorkerSession
from control_plane.fleet.workers.sessions import SessionTable

# A request moves only if it is expected to take less than this share of the time: it gives up its place in a queue, and
# prices are estimates.
REBALANCE_SHARE = 0.7
MAX_REBALANCED = 16  # requests of one worker at a time


class Rebalancer:
    """Compares the prices of waiting requests. Keeps nothing itself."""

    def __init__(
        self,
        costs: PlacementCosts,
        is_cached: Callable[[str], bool],
        jobs: UnfinishedJobs,
        sessions: SessionTable,
        isolation: PoisonIsolation,
        shortlist: Shortlist,
        dispatcher: Dispatcher,
    ) -> None:
        self._costs = costs
        self._is_cached = is_cached
        self._jobs = jobs.by_id
        self._sessions = sessions.taking
        self._isolation = isolation
        self._shortlist = shortlist
        self._dispatcher = dispatcher

    def rebalance(self) -> None:
        """Move requests that wait and have not run to idle workers. Older requests are served sooner where they are."""
        idle = {i: s for i, s in self._sessions.items() if s.scheduler.num_waiting == 0 and self._isolation.is_open(s)}
        if not idle:
            return
        for session in list(self._sessions.values()):
            if session.scheduler.num_waiting == 0:
                continue
            for request_id in list(islice(reversed(session.scheduler.unstarted_ids), MAX_REBALANCED)):
                job = self._jobs.get(request_id)
                if job is None or job.session is not session or is_suspect(job):
                    continue
                target = self._faster(job, session, idle)
                if target is not None:
                    self._dispatcher.move(job, target)
                elif not job.failed_load_epochs:
                    break  # the others of this worker are served sooner still

    def _faster(self, job: Job, session: WorkerSession, idle: dict[str, WorkerSession]) -> WorkerSession | None:
        """The best of the idle sessions for a job that waits on `session`, if moving it there pays."""
        if job.failed_load_epochs:
            idle = {i: s for i, s in idle.items() if s.epoch not in job.failed_load_epochs}
        if not idle:
            return None
        need = placement.need_of(job.request, self._costs, self._is_cached)
        cost_ms, target = min(
            ((placement.price(other, need, self._costs), other) for other in self._shortlist.choose(idle, job.request)),
            key=lambda priced: (priced[0], priced[1].worker_id),
        )
        return target if cost_ms < REBALANCE_SHARE * placement.price(session, need, self._costs) else None
