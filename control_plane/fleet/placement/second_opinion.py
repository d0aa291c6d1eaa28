"""Whether a request or its worker is the reason of logits that are not finite: other workers compute them, too.

A request whose logits were not finite goes on at another worker. Where they are not finite there either, the request or
its adapter is the reason, if one of the two gave tokens lately; else both may be sick, as all of one machine, and a
further one is asked. Where they are finite in the end, the workers before are in doubt: each is sick if that was the
base model, or the second adapter in a row. One adapter alone may lie on the edge of its dtype's range. A single
observation decides nothing: any client could make it.
"""

from __future__ import annotations

from collections.abc import Mapping

from control_plane.fleet.requests.jobs import Job, NotFinite
from control_plane.fleet.workers.session import WorkerSession
from control_plane.scheduler.types import Request

MAX_OPINIONS = 8  # workers that compute one request, where none of them gave tokens


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
        seen = [*job.not_finite_at, NotFinite(session.worker_id, session.epoch, gave_tokens=session.gives_tokens)]
        if len(seen) >= MAX_OPINIONS or (len(seen) > 1 and any(each.gave_tokens for each in seen)):
            return False
        tried = {each.worker_id for each in seen}
        others = [other for other in self._sessions.values() if other.worker_id not in tried]
        if not any(other.refusal(request) is None for other in others):
            return False
        job.not_finite_at = seen
        return True

    def refute(self, job: Job) -> list[WorkerSession]:
        """A job whose logits were not finite gained a token; the sessions of the workers that turned out to be sick."""
        assert job.not_finite_at, "nothing was in doubt"
        seen, job.not_finite_at = job.not_finite_at, []
        digest = None if job.request.adapter is None else job.request.adapter.digest
        sick = []
        for each in seen:
            session = self._sessions.get(each.worker_id)
            if session is None or session.epoch != each.epoch or job.session is session:
                continue
            if digest is None or self._refuted.get(each.epoch, digest) != digest:
                self._refuted.pop(each.epoch, None)
                sick.append(session)
            else:
                self._refuted[each.epoch] = digest
        return sick

    def forget(self, session: WorkerSession) -> None:
        """The session is over."""
        self._refuted.pop(session.epoch, None)
