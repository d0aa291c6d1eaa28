"""Finds the poison request among suspects by running them apart from others, in groups.

Suspects (deaths.py) wait in groups. A group runs on one worker, which takes nothing else until the group is cleared. A
suspect is cleared once it has survived the point where it would have killed the worker, or once it has ended. If the
worker dies earlier, the death counts against the rest of the group alone: the group is halved, and the halves run one
after the other. A suspect that ran alone is the poison request. So n suspects cost at most 3 + log2(n) deaths, rounded
up, and each innocent request waits for a few steps.

- Requests that never survived a re-prefill are halved off first: the poison request is mostly one of them.
- Marking a request as poison needs deaths of two workers if two workers fit it: one sick worker marks no request.
- The poison request explains its deaths: they no longer count against other requests.
- If the whole fleet of two workers or more is lost within a second, the reason is the network or the machine. These
  losses count against no request; each request gets that only once.
- At most half of the workers run groups. One worker always may.
- Requests that waited while a group ran go before the next group.
- A group runs on a worker that has only cleared requests. If no worker is like that and no group runs, the worker with
  the fewest requests is emptied: it takes nothing more, and requests without a row there move away. After
  `emptying_timeout_s`, or at once on an only worker, the group may run beside requests that have survived their own
  dangerous point; after twice that time, beside any request. A death then counts against every request that had not
  survived it.
- If one of two workers was lost within `emptying_timeout_s`, a group waits for it to come back.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Set
from dataclasses import dataclass

from control_plane.awake import AwakeClock
from control_plane.fleet.placement.placement import suited
from control_plane.fleet.requests.deaths import (
    clear,
    discount,
    excuse_fleet_loss,
    forget_fruitless_losses,
    has_survived,
    is_suspect,
    most_in_flight,
    open_deaths,
    record_death,
)
from control_plane.fleet.requests.jobs import Death, Job
from control_plane.fleet.requests.unfinished import UnfinishedJobs
from control_plane.fleet.settings import FleetSettings
from control_plane.fleet.workers.endings import EndCause
from control_plane.fleet.workers.session import WorkerSession
from control_plane.fleet.workers.sessions import SessionTable
from control_plane.scheduler.types import RequestId

logger = logging.getLogger(__name__)

FLEET_LOSS_S = 1.0  # within which the loss of all workers has one reason


@dataclass(frozen=True, slots=True)
class EndFinding:
    """What the end of a session says about requests."""

    poison: Job | None = None  # the request that killed the workers
    explained_epochs: frozenset[int] = frozenset()  # sessions that ended because of it
    blames_suspects: bool = False  # not the worker: suspects ran there in isolation


@dataclass(frozen=True, slots=True)
class IsolationStats:
    """Groups of suspects at one moment."""

    num_suspects: int
    num_groups: int
    num_running: int  # groups that have a worker
    emptied_worker_id: str | None  # the worker that takes nothing until a group runs there


class _Group:
    """Suspects that run together on `session`. None: they wait."""

    def __init__(self, jobs: Iterable[Job]) -> None:
        self.jobs = {job.request.request_id: job for job in jobs}
        self.session: WorkerSession | None = None

    def due(self) -> list[Job]:
        """The suspects that wait for a worker and whose reader reads: a paused one would not get past its danger."""
        return [job for job in self.jobs.values() if job.session is None and job.paused_since_s is None]


class PoisonIsolation:
    """Groups of suspects, and which workers are closed for them. Only reads `sessions` and `jobs`."""

    def __init__(
        self,
        sessions: SessionTable,
        jobs: UnfinishedJobs,
        settings: FleetSettings,
        awake: AwakeClock,
    ) -> None:
        self._sessions = sessions.taking
        self._jobs = jobs.by_id
        self._settings = settings
        self._awake = awake
        # Invariant: an unfinished suspect is in exactly one group, and no other job is in a group.
        self._groups: list[_Group] = []  # in the order in which they will run
        self._group_of: dict[RequestId, _Group] = {}
        self._running: dict[int, _Group] = {}  # epoch -> the group that runs there
        self._cleared: set[RequestId] = set()  # unfinished requests that were cleared in a group
        self._emptied: WorkerSession | None = None  # the worker that takes nothing but a group
        self._emptied_since_s = 0.0  # valid while a worker is emptied
        self._ended_s: dict[str, float] = {}  # worker id -> when its session ended, within emptying_timeout_s
        self._losses: list[tuple[float, str, int]] = []  # (when, worker id, epoch) within FLEET_LOSS_S

    def __repr__(self) -> str:
        return f"PoisonIsolation({self.stats()})"

    # ---- where requests may run ----

    def open_to(self, job: Job) -> Mapping[str, WorkerSession]:
        """Sessions that may take the job, by worker id."""
        group = self._group_of.get(job.request.request_id)
        if group is None:
            if not self._running and self._emptied is None:
                return self._sessions  # maybe a thousand: not copied for every request
            return {i: s for i, s in self._sessions.items() if self.is_open(s)}
        if job.paused_since_s is not None:
            return {}
        if group.session is not None:
            return {group.session.worker_id: group.session}
        if len(self._running) >= max(1, len(self._sessions) // 2):
            return {}
        return {s.worker_id: s for s in self._fitting(group, job) if self._is_ready(s)}

    def is_open(self, session: WorkerSession) -> bool:
        """Whether the session takes requests that are not suspects."""
        return session.epoch not in self._running and session is not self._emptied

    def is_isolated(self, job: Job) -> bool:
        """Whether the job runs in a group."""
        return job.session is not None and job.request.request_id in self._group_of

    def in_turn(self, waiting: Iterable[Job], *, is_group_over: bool) -> list[Job]:
        """Jobs that wait for a worker, in the order in which they may take one."""
        suspects = [job for group in self._groups for job in group.due()]
        ids = {job.request.request_id for job in suspects}
        others = [job for job in waiting if job.request.request_id not in ids]
        return others + suspects if is_group_over else suspects + others

    @property
    def is_awaited(self) -> bool:
        """Whether suspects wait for a worker."""
        return any(group.due() for group in self._groups)

    def worker_to_empty(self) -> WorkerSession | None:
        """The session that takes nothing more until a group runs there. To be called at every tick.

        None if no group waits, or if a group runs: its worker takes the next one.
        """
        fitting: list[WorkerSession] = []
        if not self._running and (len(self._sessions) > 1 or self._is_only_worker()):
            firsts = [(group, due[0]) for group in self._groups if (due := group.due())]
            fitting = next((found for group, job in firsts if (found := self._fitting(group, job))), [])
        if self._emptied not in fitting:
            self._emptied = min(fitting, key=lambda s: (len(s.scheduler.request_ids), s.worker_id), default=None)
            self._emptied_since_s = self._awake()
            if self._emptied is not None:
                logger.info(
                    "worker emptied for suspects worker_id=%s epoch=%d",
                    self._emptied.worker_id,
                    self._emptied.epoch,
                )
        return self._emptied

    def _fitting(self, group: _Group, job: Job) -> list[WorkerSession]:
        """Sessions without a group where this group may run; `job` is its first.

        A suspect that is alone does not run again on the only worker that died of it while another worker fits it.
        """
        fitting = suited(job, (s for s in self._sessions.values() if s.epoch not in self._running))
        seen = set(open_deaths(job))
        if len(group.jobs) == 1 and len(seen) == 1:
            return [s for s in fitting if s.worker_id not in seen] if self._has_another(job, seen) else fitting
        return fitting

    def _has_another(self, job: Job, worker_ids: set[str]) -> bool:
        """Whether a worker other than these is attached that the job fits."""
        return any(s.worker_id not in worker_ids for s in suited(job, self._sessions.values()))

    def _is_ready(self, session: WorkerSession) -> bool:
        if session.scheduler.request_ids <= self._cleared:
            return True
        if session is not self._emptied:
            return False
        patience_s = 0.0 if self._is_only_worker() else self._settings.emptying_timeout_s
        waited_s = self._awake() - self._emptied_since_s
        if waited_s >= patience_s + self._settings.emptying_timeout_s:
            return True
        there = [self._jobs[i] for i in session.scheduler.request_ids if i in self._jobs]
        return waited_s >= patience_s and all(map(self._is_settled, there))

    def _is_settled(self, job: Job) -> bool:
        """Whether a running request cannot be the next one to kill its worker."""
        return job.request.request_id in self._cleared or has_survived(job, self._settings.plan_depth)

    def _is_only_worker(self) -> bool:
        now_s, patience_s = self._awake(), self._settings.emptying_timeout_s
        return len(self._sessions) == 1 and not any(
            now_s - ended_s < patience_s for i, ended_s in self._ended_s.items() if i not in self._sessions
        )

    # ---- what happens to suspects ----

    def placed(self, job: Job) -> None:
        """A job was given to a session. If it is a suspect, its group runs there from now on."""
        group = self._group_of.get(job.request.request_id)
        if group is not None and job.session is not None:
            group.session = job.session
            self._running[job.session.epoch] = group
            self._emptied = None

    def clear_survivors(self) -> bool:
        """Clear the suspects that survived. True if a group is over with that."""
        is_over = False
        for group in list(self._running.values()):
            for job in list(group.jobs.values()):
                if job.session is group.session and has_survived(job, self._settings.plan_depth):
                    clear(job)
                    self._cleared.add(job.request.request_id)
                    is_over |= self._leave(job)
        return is_over

    def separate(self, job: Job) -> bool:
        """Give a suspect that cannot run where its group runs a group of its own. True if the old group is over."""
        is_over = self._leave(job)
        self.add([job])
        return is_over

    def forget(self, job: Job) -> bool:
        """The job is over. True if a group is over with it."""
        self._cleared.discard(job.request.request_id)
        return self._leave(job)

    def note_end(self, session: WorkerSession, computed: list[Job]) -> EndFinding:
        """Count the end of a session, which is detached, against the jobs that it computed."""
        now_s = self._awake()
        self._ended_s = {i: s for i, s in self._ended_s.items() if now_s - s < self._settings.emptying_timeout_s}
        self._ended_s[session.worker_id] = now_s
        if self._emptied is session:
            self._emptied = None
        group = self._running.pop(session.epoch, None)
        if group is not None:
            group.session = None
        if not session.is_death:
            return EndFinding()
        members = {} if group is None else group.jobs
        isolated = [job for job in computed if job.request.request_id in members]
        beside = [job for job in computed if job.request.request_id not in members]
        unsettled = [job for job in beside if not self._is_settled(job)]
        blamed = computed if unsettled or not isolated else isolated
        is_loss = session.end_cause is EndCause.LOST
        for job in blamed:
            record_death(job, Death(session.epoch, session.worker_id, is_loss=is_loss), self._settings.plan_depth)
        if is_loss and self._is_fleet_lost(session, now_s):
            self._discount_fleet_loss({epoch for _, _, epoch in self._losses})
        isolated = [job for job in isolated if job.deaths and job.deaths[-1].epoch == session.epoch]
        if len(isolated) == 1 and not unsettled and not self._needs_another_worker(isolated[0]):
            return EndFinding(isolated[0], self._explain(isolated[0]), blames_suspects=True)
        for job in isolated:
            self._leave(job)
        self.add([job for job in blamed if is_suspect(job) and job.request.request_id not in self._group_of])
        return EndFinding(blames_suspects=bool(isolated))

    def outlived(self, worker_id: str, epoch: int) -> bool:
        """The worker's process outlived its session of this epoch. True if a group is over with that."""
        return self._discount(
            {epoch},
            [
                job
                for job in self._jobs.values()
                if any((d.epoch, d.worker_id, d.is_loss) == (epoch, worker_id, True) for d in job.deaths)
            ],
        )

    def stats(self) -> IsolationStats:
        """What is isolated."""
        return IsolationStats(
            num_suspects=len(self._group_of),
            num_groups=len(self._groups),
            num_running=len(self._running),
            emptied_worker_id=None if self._emptied is None else self._emptied.worker_id,
        )

    def check_invariants(self) -> None:
        """Raise AssertionError with a sentence if the groups are inconsistent. Looks at everything: for tests."""
        suspects = {i for i, job in self._jobs.items() if is_suspect(job)}
        assert self._group_of.keys() == suspects, f"suspects {suspects} are in groups {self._group_of.keys()}"
        assert sum(len(group.jobs) for group in self._groups) == len(suspects), "a suspect is in two groups"
        for group in self._groups:
            assert group.jobs and all(self._group_of[i] is group for i in group.jobs), "a group has others' jobs"
            at = {job.session for job in group.jobs.values()} - {None}
            assert at == ({group.session} if group.session else set()), f"a group of {group.session} runs at {at}"
        running = {group.session.epoch: group for group in self._groups if group.session is not None}
        assert running == self._running, f"groups run at {running.keys()}, recorded are {self._running.keys()}"
        attached = {session.epoch for session in self._sessions.values()}
        assert running.keys() <= attached, "a group runs without a worker"

    # ---- groups ----

    def add(self, jobs: list[Job]) -> None:
        """Let these suspects run next, in halves. They hold all that was computed at the last death."""
        groups = [_Group(half) for half in self._halves(jobs) if half]
        for group in groups:
            self._group_of.update(dict.fromkeys(group.jobs, group))
        self._groups[:0] = groups

    def _halves(self, jobs: list[Job]) -> tuple[list[Job], list[Job]]:
        """Jobs that never survived a re-prefill, and the others. If all are of one kind, one half of them each."""
        jobs = sorted(jobs, key=lambda job: job.num_generated)
        num_new = sum(job.num_generated <= most_in_flight(job, self._settings.plan_depth) for job in jobs)
        middle = num_new if 0 < num_new < len(jobs) else (len(jobs) + 1) // 2
        return jobs[:middle], jobs[middle:]

    def _leave(self, job: Job) -> bool:
        """Take a job out of its group, if it is in one. True if the group ran and none of its jobs still runs."""
        group = self._group_of.pop(job.request.request_id, None)
        if group is None:
            return False
        del group.jobs[job.request.request_id]
        session = group.session
        is_over = session is not None and not any(other.session is session for other in group.jobs.values())
        if session is not None and is_over:
            del self._running[session.epoch]
            group.session = None
        if is_over or not group.jobs:
            self._groups.remove(group)
            if group.jobs:
                self._groups.append(group)  # they could not run, and wait again
        return is_over

    # ---- which requests a death counts against ----

    def _needs_another_worker(self, job: Job) -> bool:
        """Whether all deaths of the job are of one worker, and another worker fits it."""
        seen = set(open_deaths(job))
        return len(seen) == 1 and self._has_another(job, seen)

    def _is_fleet_lost(self, session: WorkerSession, now_s: float) -> bool:
        self._losses = [loss for loss in self._losses if now_s - loss[0] < FLEET_LOSS_S]
        self._losses.append((now_s, session.worker_id, session.epoch))
        return not self._sessions and len({worker_id for _, worker_id, _ in self._losses}) > 1

    def _discount_fleet_loss(self, epochs: set[int]) -> None:
        """The whole fleet was lost. A job that was computed at two of these deaths may still be the reason."""
        affected = [
            job
            for job in self._jobs.values()
            if not job.had_fleet_loss and sum(death.epoch in epochs for death in job.deaths) == 1
        ]
        for job in affected:
            excuse_fleet_loss(job)
        logger.warning("all workers lost at once: counted against no request num_workers=%d", len(epochs))
        self._discount(epochs, affected)

    def _explain(self, poison: Job) -> frozenset[int]:
        """Discount the deaths of the poison request for all other jobs. Returns the epochs of these deaths."""
        epochs = frozenset(death.epoch for death in poison.deaths if not death.is_cleared)
        others = [job for job in self._jobs.values() if job is not poison]
        for job in others:
            forget_fruitless_losses(job)
        self._discount(epochs, others)
        return epochs

    def _discount(self, epochs: Set[int], jobs: list[Job]) -> bool:
        is_over = False
        for job in jobs:
            discount(job, epochs)
            if job.request.request_id in self._group_of and not is_suspect(job):
                is_over |= self._leave(job)
        return is_over
