"""Whether a request or its worker is the reason of logits that are not finite: another worker computes them, too.

A request whose logits were not finite goes on at another worker, once. Where they are not finite there either, the
request or its adapter is the reason. Where they are, the first worker is in doubt: it is sick if that was the base
model, or the second adapter in a row. One adapter alone may lie on the edge of its dtype's range. A single observation
decides nothing: any client could make it.
"""

from __future__ import annotations

from collections.abc import Mapping

from control_plane.fleet.jobs import Job
from control_plane.fleet.session import WorkerSession
from control_plane.scheduler.types import Request


class SecondOpinions:
    """`sessions` are the dispatcher's own, read only."""

    def __init__(self, sessions: Mapping[str, WorkerSession]) -> None:
        self._sessions = sessions
        self._refuted: dict[int, str | None] = {}  # epoch -> the adapter that was not finite there, and elsewhere was

    def ask(self, job: Job, request: Request) -> bool:
        """Note that a job's logits were not finite; whether another worker is to compute them.

        `request` is the job's with every accepted token.
        """
        session = job.session
        assert session is not None, "logits of a request without a worker"
        if job.not_finite_at is not None:
            return False
        others = [other for other in self._sessions.values() if other.worker_id != session.worker_id]
        if not any(other.refusal(request) is None for other in others):
            return False
        job.not_finite_at = session.worker_id, session.epoch
        return True

    def refute(self, job: Job) -> WorkerSession | None:
        """A job whose logits were not finite gained a token; the session of the worker that turned out to be sick."""
        assert job.not_finite_at is not None, "nothing was in doubt"
        worker_id, epoch = job.not_finite_at
        session, adapter = self._sessions.get(worker_id), job.request.adapter
        job.not_finite_at = None
        if session is None or session.epoch != epoch or job.session is session:
            return None
        digest = None if adapter is None else adapter.digest
        if digest is None or self._refuted.get(epoch, digest) != digest:
            self._refuted.pop(epoch, None)
            return session
        self._refuted[epoch] = digest
        return None

    def forget(self, session: WorkerSession) -> None:
        """The session is over."""
        self._refuted.pop(session.epoch, None)
