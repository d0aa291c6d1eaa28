"""Who may run beside a request that may be killing workers. State and rules; the dispatcher acts on them.

A request that was being computed at two worker deaths is a suspect. It waits for a worker where nothing runs but
requests that were cleared before it, and is on trial there: until that is over the worker takes nothing else. It is
cleared when it has gained more tokens than can be in flight: what killed a worker once does so again at the re-prefill
or at the token after it. A worker that dies while it computes the suspect convicts it, and acquits all others there.

Where no worker is empty, the one with the least to do takes nothing more until it is. Where there is one worker only,
nothing can be kept apart for long: a suspect is tried alone if nothing runs there, else beside what does, and those
that waited for the end of a trial go before the next suspect.
"""

from __future__ import annotations

from control_plane.fleet.jobs import Job, num_indices_of
from control_plane.fleet.session import WorkerSession
from control_plane.scheduler.run_ahead import MAX_PLAN_STEPS
from control_plane.scheduler.types import RequestId

DEATHS_TO_SUSPECT = 2


def is_suspect(job: Job) -> bool:
    """Whether the request may be what kills workers."""
    return job.num_deaths >= DEATHS_TO_SUSPECT


def is_cleared(job: Job, plan_depth: int) -> bool:
    """Whether a suspect on trial has come past the point where it would have killed its worker."""
    assert job.session is not None, "a trial without a worker"
    num_gained = max(job.num_tokens_here, job.session.scheduler.num_searched(job.request.request_id))
    return num_gained > (plan_depth * MAX_PLAN_STEPS + 1) * num_indices_of(job.request)


class Trials:
    """Which workers are closed, and to whom. `sessions` are the dispatcher's own, read only."""

    def __init__(self, sessions: dict[str, WorkerSession]) -> None:
        self._sessions = sessions
        self._suspects: dict[int, Job] = {}  # epoch -> the suspect on trial there
        self._cleared: set[RequestId] = set()  # unfinished requests that stood a trial
        self._emptied: WorkerSession | None = None  # takes nothing until nothing runs there, for a suspect that waits

    def open_to(self, job: Job) -> dict[str, WorkerSession]:
        """Sessions that may take the job, by worker id."""
        if not is_suspect(job):
            if not self._suspects and self._emptied is None:
                return self._sessions  # of maybe a thousand: not copied for every request
            return {i: s for i, s in self._sessions.items() if self.is_open(s)}
        free = {i: s for i, s in self._sessions.items() if s.epoch not in self._suspects}
        if not _is_due(job):
            return {}
        return free if len(self._sessions) == 1 else {i: s for i, s in free.items() if self._is_empty(s)}

    def in_turn(self, jobs: list[Job]) -> list[Job]:
        """Jobs that wait for a worker, in the order in which they may take one. Opens what no suspect waits for."""
        suspects = [job for job in jobs if _is_due(job)]
        if not suspects:
            self._emptied = None
        others = [job for job in jobs if not _is_due(job)]
        is_only_busy = len(self._sessions) == 1 and all(s.scheduler.groups for s in self._sessions.values())
        return others + suspects if is_only_busy else suspects + others

    def to_empty(self, jobs: list[Job]) -> WorkerSession | None:
        """The session that takes nothing more from here on, so that a suspect among those that wait can be tried.

        None if there is none such, if one is being emptied already, or if a trial is under way: its worker is next.
        """
        if self._emptied is not None and not self._emptied.ended.is_set():
            return None
        suspect = next(filter(_is_due, jobs), None)
        if suspect is None or self._suspects or len(self._sessions) < 2:
            return None
        fitting = [session for session in self._sessions.values() if session.fits(suspect.request)]
        self._emptied = min(fitting, key=lambda s: (len(s.scheduler.groups), s.worker_id), default=None)
        return self._emptied

    @property
    def is_emptying(self) -> bool:
        """Whether some session takes nothing until a suspect can be tried there."""
        return self._emptied is not None

    def is_open(self, session: WorkerSession) -> bool:
        """Whether the session takes requests that are no suspects."""
        return session.epoch not in self._suspects and session is not self._emptied

    def begin(self, job: Job) -> None:
        """A suspect was given to a session."""
        assert job.session is not None, "a trial without a worker"
        self._suspects[job.session.epoch] = job
        if self._emptied is job.session:
            self._emptied = None

    def end(self, job: Job) -> None:
        """The suspect is cleared, or over."""
        assert job.session is not None, "a trial without a worker"
        del self._suspects[job.session.epoch]
        job.num_deaths = 0
        self._cleared.add(job.request.request_id)

    def break_off(self, session: WorkerSession) -> Job | None:
        """The suspect on trial at a session that is over, or that could not load its adapter; it stays a suspect."""
        return self._suspects.pop(session.epoch, None)

    def is_on_trial(self, job: Job) -> bool:
        """Whether the job is on trial."""
        return job.session is not None and self._suspects.get(job.session.epoch) is job

    def on_trial(self) -> list[Job]:
        """Every suspect on trial."""
        return list(self._suspects.values())

    def forget(self, job: Job) -> None:
        """The job is over."""
        self._cleared.discard(job.request.request_id)

    def _is_empty(self, session: WorkerSession) -> bool:
        return session.scheduler.groups.keys() <= self._cleared


def _is_due(job: Job) -> bool:
    """Whether a job that waits is to be tried; nothing would come of it while nobody reads."""
    return is_suspect(job) and job.full_since_s is None
