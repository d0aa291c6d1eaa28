"""Takes requests away from workers that an operator is about to stop, and lets workers have requests again."""

from __future__ import annotations

import logging

from control_plane.errors import LastWorker, WorkerNotFound
from control_plane.fleet.attach import AttachedWorkers
from control_plane.fleet.placement.dispatcher import Dispatcher
from control_plane.fleet.requests.unfinished import UnfinishedJobs
from control_plane.fleet.workers.endings import EndCause
from control_plane.fleet.workers.sessions import SessionTable

logger = logging.getLogger(__name__)
MAX_NAMED = 16  # workers in a message


class WorkerDrains:
    """Which workers are drained is in the session table, and is forgotten when the control plane ends.

    A drained worker stays attached. Its session ends once, which moves its requests as if it had left.
    """

    def __init__(
        self, sessions: SessionTable, jobs: UnfinishedJobs, dispatcher: Dispatcher, workers: AttachedWorkers
    ) -> None:
        self._sessions = sessions
        self._jobs = jobs
        self._dispatcher = dispatcher
        self._workers = workers

    @property
    def worker_ids(self) -> list[str]:
        """Ids of drained workers, attached or not, in order."""
        return self._sessions.drained_ids

    def drain(self, worker_id: str, *, is_forced: bool = False) -> int:
        """Give the worker no further requests, and move those that it has; how many it had. Nothing if it is drained.

        `is_forced`: also if no other worker takes requests, so that they wait for one. Raises WorkerNotFound or
        LastWorker.
        """
        if worker_id in self._sessions.drained_ids:
            return 0
        session = self._sessions.by_id.get(worker_id)
        if session is None:
            raise self._not_found(worker_id, "attached", sorted(self._sessions.by_id))
        if not is_forced and set(self._sessions.taking) == {worker_id}:
            raise LastWorker(
                f"worker_id: no worker but {worker_id} takes requests, and they would wait for one; start another "
                "worker, or send force"
            )
        num_requests = sum(job.session is session for job in self._jobs.by_id.values())
        self._sessions.drain(worker_id)
        self._workers.begin_grace_without_workers()
        logger.info("worker drained worker_id=%s epoch=%d requests=%d", worker_id, session.epoch, num_requests)
        session.end(EndCause.DRAINED, "an operator drained the worker: its requests move to others")
        return num_requests

    def undrain(self, worker_id: str) -> None:
        """Give the worker requests again. Nothing if it is attached and not drained. Raises WorkerNotFound."""
        drained = self._sessions.drained_ids
        if worker_id not in drained:
            if worker_id in self._sessions.by_id:
                return
            raise self._not_found(worker_id, "attached or drained", sorted({*self._sessions.by_id, *drained}))
        self._sessions.undrain(worker_id)
        logger.info("worker not drained any more worker_id=%s", worker_id)
        self._dispatcher.place_waiting()
        self._workers.report_change()

    def _not_found(self, worker_id: str, state: str, known: list[str]) -> WorkerNotFound:
        named = ", ".join(known[:MAX_NAMED]) + (f" and {len(known) - MAX_NAMED} more" if known[MAX_NAMED:] else "")
        return WorkerNotFound(f"worker_id: no worker {worker_id} is {state}; those that are: {named or 'none'}")
