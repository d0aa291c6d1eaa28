"""Finds out whether a request or its worker causes logits that are not finite: another worker computes it, too.

A request whose logits were not finite goes on at another worker.
- Not finite there either: the request or its adapter is the reason, if one of the two workers gave tokens lately.
  Otherwise both workers may be sick, as all workers of one machine, and a further worker checks.
- Finite at last: the workers before are in doubt. Such a worker is sick if the request used the base model, or if this
  is the second adapter in a row that failed only there. One adapter alone may lie on the edge of its dtype's range.
A single observation decides nothing: any client could make it.
"""

from __future__ import annotations

from collections.abc import Mapping

from control_plane.fleet.requests.jobs import Job, NotFinite
from control_plane.fleet.workers.session import WorkerSession
from control_plane.scheduler.types import Request

MAX_CHECKS = 8  # workers that compute one request, if none of them gave tokens lately


class SecondChecks:
    """Only reads `sessions`."""

    def __init__(self, sessions: Mapping[str, WorkerSession]) -> None:
        self._sessions = sessions
        self._differed: dict[int, str | None] = {}  # epoch -> adapter that was finite elsewhere, not there

    def start(self, job: Job, request: Request) -> bool:
        """Record that a job's logits were not finite. True if another worker must compute the job.

        `request` is the job's with every accepted token.
        """
        session = job.session
        assert session is not None, "logits of a request without a worker"
        here = NotFinite(session.worker_id, session.epoch, gave_tokens=session.steps.gives_tokens)
        seen = [*job.not_finite_at, here]
        if len(seen) >= MAX_CHECKS or (len(seen) > 1 and any(each.gave_tokens for each in seen)):
            return False
        tried = {each.worker_id for each in seen}
        others = [other for other in self._sessions.values() if other.worker_id not in tried]
        if not any(other.refusal(request) is None for other in others):
            return False
        job.note_not_finite(here)
        return True

    def on_finite(self, job: Job) -> list[WorkerSession]:
        """A job whose logits were not finite gained a token. Returns the sessions of workers that proved to be sick."""
        assert job.not_finite_at, "no logits of the job were in doubt"
        digest = job.request.adapters_name
        sick = []
        for each in job.take_not_finite():
            session = self._sessions.get(each.worker_id)
            if session is None or session.epoch != each.epoch or job.session is session:
                continue
            if digest is None or self._differed.get(each.epoch, digest) != digest:
                self._differed.pop(each.epoch, None)
                sick.append(session)
            else:
                self._differed[each.epoch] = digest
        return sick

    def forget(self, session: WorkerSession) -> None:
        """Drop what is recorded about a session that has ended."""
        self._differed.pop(session.epoch, None)
