"""Every request that has not ended, and the ways in which one ends.

Owns the table of jobs: the other parts of the fleet read it. When a job is over, everybody who keeps something about
it is called, in the order of `call_when_over`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping

from control_plane.errors import MotetError
from control_plane.fleet.requests.failures import broken
from control_plane.fleet.requests.jobs import Job
from control_plane.fleet.requests.quotas import TenantQuotas
from control_plane.scheduler.types import RequestId

logger = logging.getLogger(__name__)


class UnfinishedJobs:
    """Jobs by request id."""

    def __init__(self, quotas: TenantQuotas) -> None:
        self._by_id: dict[RequestId, Job] = {}
        self.by_id: Mapping[RequestId, Job] = self._by_id  # to be read by everybody
        self.num_finished = 0  # in all
        self._quotas = quotas
        self._when_over: list[Callable[[Job], None]] = []
        self._all_over = asyncio.Event()  # no job is left, or `stop_waiting` was called

    def __repr__(self) -> str:
        return f"UnfinishedJobs(requests={len(self._by_id)}, finished={self.num_finished})"

    def call_when_over(self, callback: Callable[[Job], None]) -> None:
        """Have `callback` called with every job that is over, once it is no longer in the table."""
        self._when_over.append(callback)

    def add(self, job: Job) -> None:
        """Take a job on."""
        request_id = job.request.request_id
        assert request_id not in self._by_id, f"request id {request_id} is in use"
        self._by_id[request_id] = job

    def finish(self, job: Job) -> None:
        """The job is over; its stream has ended, or ends without more."""
        self.num_finished += 1
        # A beam search delivers at its end only: if it is cancelled, it pays for what was computed until then.
        num_generated = max(job.num_generated, job.num_searched)
        job.stream.note_new_tokens(num_generated)
        self._quotas.end(job.charge, num_generated)
        self._forget(job)

    def withdraw(self, job: Job) -> None:
        """The job was not taken on after all: it counts nowhere."""
        self._quotas.withdraw(job.charge)
        self._forget(job)

    def fail(self, job: Job, error: MotetError) -> None:
        """End a job with an error. Its session, if any, has dropped it already, or the caller makes it do so."""
        job.stream.fail(error)
        self.finish(job)

    def cancel(self, job: Job, error: MotetError) -> None:
        """End a job with an error, and drop it at its session."""
        if job.session is not None:
            job.session.cancel(job.request.request_id)
        self.fail(job, error)

    def fail_broken(self, job: Job) -> None:
        """End a job whose handling raised an exception just now, a mistake of ours; the other jobs live."""
        request_id, session = job.request.request_id, job.session
        logger.exception("request broken request_id=%d", request_id)
        if session is not None:
            self.guard(lambda: session.cancel(request_id))
        if not job.stream.has_ended:
            self.guard(lambda: job.stream.fail(broken()))
        if request_id in self._by_id:
            self.guard(lambda: self.finish(job))

    def guard(self, act: Callable[[], None], job: Job | None = None) -> None:
        """Run one action. If it raises, end its job; the caller goes on."""
        try:
            act()
        except Exception:
            if job is None:
                logger.exception("fleet failed")
            else:
                self.fail_broken(job)

    async def all_over(self) -> None:
        """Return once no job is left, or `stop_waiting` was called."""
        self._all_over.clear()
        if self._by_id:
            await self._all_over.wait()

    def stop_waiting(self) -> None:
        """Let `all_over` return although jobs are left."""
        self._all_over.set()

    def _forget(self, job: Job) -> None:
        del self._by_id[job.request.request_id]
        if not self._by_id:
            self._all_over.set()
        for callback in self._when_over:
            callback(job)
