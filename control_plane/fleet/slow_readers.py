"""Requests whose readers are far behind: they are paused until something was read, and end if that takes too long."""

from __future__ import annotations

from functools import partial

from control_plane.awake import AwakeClock
from control_plane.errors import SlowConsumer
from control_plane.fleet.placement.dispatcher import Dispatcher
from control_plane.fleet.requests.jobs import Job
from control_plane.fleet.requests.streams import MAX_UNREAD_TOKENS
from control_plane.fleet.requests.unfinished import UnfinishedJobs
from control_plane.scheduler.types import RequestId


class SlowReaders:
    """Jobs whose streams are full. Time in which the control plane did not run is not counted."""

    def __init__(self, timeout_s: float, awake: AwakeClock, jobs: UnfinishedJobs, dispatcher: Dispatcher) -> None:
        self._timeout_s = timeout_s
        self._awake = awake
        self._jobs = jobs
        self._dispatcher = dispatcher
        self._paused: dict[RequestId, Job] = {}
        jobs.call_when_over(self._forget)

    def pause(self, job: Job) -> None:
        """Pause a job with a full stream. Does nothing if it is paused already, or runs in isolation."""
        if job.paused_since_s is None and not self._dispatcher.is_isolated(job):
            job.pause(self._awake())
            self._paused[job.request.request_id] = job
            assert job.session is not None, "tokens of a request without a session"
            job.session.pause(job.request.request_id)

    def on_read(self, request_id: RequestId) -> None:
        """The reader has read: let the job go on if it is paused."""
        job = self._paused.pop(request_id, None)
        if job is None:
            return
        job.resume()
        if job.session is not None:
            job.session.resume(request_id)
        else:
            self._dispatcher.place_waiting()  # a suspect does not run while its reader does not read

    def end_overdue(self) -> None:
        """Fail the jobs of which nothing was read for as long as a reader may take."""
        now_s = self._awake()
        reason = f"{MAX_UNREAD_TOKENS} tokens were not read for {self._timeout_s:g} s; read faster"
        for job in list(self._paused.values()):
            if job.paused_since_s is not None and now_s - job.paused_since_s >= self._timeout_s:
                self._jobs.guard(partial(self._jobs.cancel, job, SlowConsumer(reason)), job)

    def _forget(self, job: Job) -> None:
        self._paused.pop(job.request.request_id, None)
