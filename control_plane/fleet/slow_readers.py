"""Requests whose readers are far behind: they are not scheduled until something was read, or their time is up."""

from __future__ import annotations

from control_plane.awake import AwakeClock
from control_plane.fleet.jobs import Job
from control_plane.scheduler.types import RequestId


class SlowReaders:
    """Jobs whose streams are full. Time in which the control plane did not run is not counted."""

    def __init__(self, timeout_s: float, awake: AwakeClock) -> None:
        self._timeout_s = timeout_s
        self._awake = awake
        self._full: dict[RequestId, Job] = {}

    def hold(self, job: Job) -> None:
        """Schedule a job with a full stream no more; nothing happens where that was done already."""
        if job.full_since_s is None:
            job.full_since_s = self._awake()
            self._full[job.request.request_id] = job
            assert job.session is not None, "tokens of a request without a session"
            job.session.pause(job.request.request_id)

    def release(self, request_id: RequestId) -> Job | None:
        """The job, to be scheduled again, if it was held: its reader has read."""
        job = self._full.pop(request_id, None)
        if job is not None:
            job.full_since_s = None
        return job

    def forget(self, request_id: RequestId) -> None:
        """The job is over."""
        self._full.pop(request_id, None)

    def overdue(self) -> list[Job]:
        """Jobs of which nothing was read for the time that a reader has."""
        now_s = self._awake()
        return [
            job
            for job in self._full.values()
            if job.full_since_s is not None and now_s - job.full_since_s >= self._timeout_s
        ]
