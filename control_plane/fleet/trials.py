"""Who may run beside a request that may be killing workers. State and rules; the dispatcher acts on them.

A request that was being computed at two worker deaths is a suspect. It waits for a worker where nothing runs but
requests that were cleared before it, and is on trial there: until that is over the worker takes nothing else. It is
cleared when it has gained more tokens than can be in flight: what killed a worker once does so again at the re-prefill
or at the token after it. A worker that dies while it computes the suspect convicts it, and acquits all others there.

- At most half of the workers are closed by trials, but one of them may always be.
- Whoever waited for the end of a trial goes before the next suspect.
- Where no worker is empty and no trial is under way, the one with the least to do is emptied: it takes nothing more,
  and what has no row there moves away. What still runs after `emptying_timeout_s` stays, and the suspect is tried
  beside it.
- Where there is one worker only, and none was lost within `worker_grace_s` that may come back, nothing can be kept
  apart: a suspect is tried beside what runs there.
"""

from __future__ import annotations

import logging

from control_plane.awake import AwakeClock
from control_plane.fleet.jobs import Job, num_indices_of
from control_plane.fleet.placement import suited
from control_plane.fleet.session import WorkerSession
from control_plane.fleet.settings import FleetSettings
from control_plane.scheduler.run_ahead import MAX_PLAN_STEPS
from control_plane.scheduler.types import RequestId

logger = logging.getLogger(__name__)

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

    def __init__(self, sessions: dict[str, WorkerSession], settings: FleetSettings, awake: AwakeClock) -> None:
        self._sessions = sessions
        self._settings = settings
        self._awake = awake
        self._suspects: dict[int, Job] = {}  # epoch -> the suspect on trial there
        self._cleared: set[RequestId] = set()  # unfinished requests that stood a trial
        self._emptied: WorkerSession | None = None  # takes nothing but a suspect
        self._emptied_since_s = 0.0  # meaningful while there is one
        self._lost_s: dict[str, float] = {}  # worker id -> when it was lost, within the grace

    def open_to(self, job: Job) -> dict[str, WorkerSession]:
        """Sessions that may take the job, by worker id."""
        if not is_suspect(job):
            if not self._suspects and self._emptied is None:
                return self._sessions  # of maybe a thousand: not copied for every request
            return {i: s for i, s in self._sessions.items() if self.is_open(s)}
        if not _is_due(job) or len(self._suspects) >= max(1, len(self._sessions) // 2):
            return {}
        free = {i: s for i, s in self._sessions.items() if s.epoch not in self._suspects}
        return free if self._is_only_worker() else {i: s for i, s in free.items() if self._is_empty(s)}

    def in_turn(self, jobs: list[Job], *, is_trial_over: bool) -> list[Job]:
        """Jobs that wait for a worker, in the order in which they may take one."""
        suspects = [job for job in jobs if _is_due(job)]
        others = [job for job in jobs if not _is_due(job)]
        return others + suspects if is_trial_over else suspects + others

    def to_empty(self, jobs: list[Job]) -> WorkerSession | None:
        """The session that takes nothing more until a suspect among those that wait is tried there.

        None if there is none such, or if a trial is under way: its worker is next. To be asked at every tick.
        """
        suspects = [job for job in jobs if _is_due(job)]
        if self._suspects or len(self._sessions) < 2:
            suspects = []
        fitting = next((found for job in suspects if (found := suited(job, self._sessions.values()))), [])
        if self._emptied not in fitting:
            self._emptied = min(fitting, key=lambda s: (len(s.scheduler.groups), s.worker_id), default=None)
            self._emptied_since_s = self._awake()
            if self._emptied is not None:
                logger.info(
                    "worker is being emptied for a suspect worker_id=%s epoch=%d",
                    self._emptied.worker_id,
                    self._emptied.epoch,
                )
        return self._emptied

    def note_lost(self, session: WorkerSession) -> None:
        """The session is over, and its worker may come back."""
        now_s = self._awake()
        self._lost_s = {i: lost_s for i, lost_s in self._lost_s.items() if self._may_come_back(lost_s, now_s)}
        self._lost_s[session.worker_id] = now_s

    def is_open(self, session: WorkerSession) -> bool:
        """Whether the session takes requests that are no suspects."""
        return session.epoch not in self._suspects and session is not self._emptied

    def begin(self, job: Job) -> None:
        """A suspect was given to a session."""
        assert job.session is not None, "a trial without a worker"
        self._suspects[job.session.epoch] = job
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
        if session is self._emptied and self._awake() - self._emptied_since_s >= self._settings.emptying_timeout_s:
            return True
        return session.scheduler.groups.keys() <= self._cleared

    def _is_only_worker(self) -> bool:
        now_s = self._awake()
        return len(self._sessions) == 1 and not any(
            self._may_come_back(lost_s, now_s) for i, lost_s in self._lost_s.items() if i not in self._sessions
        )

    def _may_come_back(self, lost_s: float, now_s: float) -> bool:
        return now_s - lost_s < self._settings.worker_grace_s


def _is_due(job: Job) -> bool:
    """Whether a job that waits is to be tried; nothing would come of it while nobody reads."""
    return is_suspect(job) and job.full_since_s is None
