"""Workers come and go here: attaching one, what its session reports, and moving its requests when the session ends."""

from __future__ import annotations

import logging
from collections.abc import Callable

from contract.v1 import plan_pb2
from control_plane.audit import actions
from control_plane.audit.audit_log import AuditLog
from control_plane.awake import AwakeClock
from control_plane.caller import Caller, current_caller
from control_plane.errors import ShuttingDown
from control_plane.fleet.adapters.cache_warmer import CacheWarmer, WeightsLike
from control_plane.fleet.adapters.preloads import AdapterPreloads
from control_plane.fleet.adapters.unloads import AdapterUnloads
from control_plane.fleet.delivery import Delivery
from control_plane.fleet.gate.fencing import WorkerGate
from control_plane.fleet.placement.dispatcher import Dispatcher
from control_plane.fleet.placement.migration import Migration
from control_plane.fleet.requests.jobs import Job
from control_plane.fleet.requests.unfinished import UnfinishedJobs
from control_plane.fleet.settings import FleetSettings
from control_plane.fleet.workers.endings import EndCause
from control_plane.fleet.workers.session import WorkerSession
from control_plane.fleet.workers.sessions import SessionTable
from control_plane.observers.timings import NO_TIMINGS, Timings
from control_plane.registry.model.served_modules import WorkerReport
from control_plane.scheduler.fairness import VirtualCounters
from control_plane.scheduler.types import Outputs, Vocabulary

logger = logging.getLogger(__name__)


class AttachedWorkers:
    """Opens and closes the sessions, and is what they report to."""

    def __init__(
        self,
        *,
        settings: FleetSettings,
        gate: WorkerGate,
        weights: WeightsLike,
        counters: VirtualCounters,
        jobs: UnfinishedJobs,
        sessions: SessionTable,
        dispatcher: Dispatcher,
        migration: Migration,
        delivery: Delivery,
        unloads: AdapterUnloads,
        preloads: AdapterPreloads,
        clock: Callable[[], float],
        awake: AwakeClock,
        audit: AuditLog,
        vocabulary: Vocabulary | None,
        timings: Timings = NO_TIMINGS,
    ) -> None:
        self._settings = settings
        self._gate = gate
        self._weights = weights
        self._counters = counters  # of all sessions
        self._jobs = jobs
        self._sessions = sessions
        self._dispatcher = dispatcher
        self._migration = migration
        self._delivery = delivery
        self._unloads = unloads
        self._preloads = preloads
        self._clock = clock
        self._awake = awake
        self._audit = audit
        self._attached_by: dict[int, Caller] = {}  # epoch -> who opened the session
        self._cache_warmer = CacheWarmer(weights)
        self._pinned: set[str] = set()  # digests
        self._timings = timings
        self._vocabulary = vocabulary  # that every session begins with
        self._no_worker_since_s = awake()  # valid while no worker takes requests
        self._is_closed = False
        self._when_changed: list[Callable[[], None]] = []

    # ---- for the fleet ----

    @property
    def no_worker_since_s(self) -> float | None:
        """Since when no worker takes requests, on the clock of `AwakeClock`; None while one does."""
        return None if self._sessions.taking else self._no_worker_since_s

    def attach(self, hello: plan_pb2.Hello, refusal: Callable[[], str | None] = lambda: None) -> WorkerSession:
        """A session for the worker that sent this Hello. An earlier session of the same process ends.

        The session ends once `refusal` gives a reason.

        Raises ShuttingDown, or what WorkerGate.admit raises.
        """
        if self._is_closed:
            raise ShuttingDown("the control plane is shutting down")
        former = self._sessions.by_id.get(hello.worker_id)
        epoch = self._gate.admit(hello, former)
        session = WorkerSession(
            hello,
            epoch,
            self._settings,
            self,
            self._weights.worker_address,
            self._clock,
            self._awake,
            self._counters,
            refusal,
            self._timings,
        )
        if self._vocabulary is not None:
            session.send_vocabulary(self._vocabulary)
        session.set_pinned(self._pinned)
        self._sessions.open(session)
        logger.info("worker attached worker_id=%s epoch=%d", session.worker_id, epoch)
        self._attached_by[epoch] = current_caller()
        self._audit.event(
            actions.ATTACH, f"workers/{session.worker_id}", caller=current_caller(), more={"epoch": epoch}
        )
        if former is not None:
            former.end(EndCause.CLOSED, "its worker attached anew")
        if hello.last_epoch:
            self._migration.outlived(hello.worker_id, hello.last_epoch)
        self._dispatcher.place_waiting()
        self.report_change()
        return session

    def call_when_changed(self, callback: Callable[[], None]) -> None:
        """Have `callback` called after a worker attached or was lost."""
        self._when_changed.append(callback)

    def reports(self) -> list[WorkerReport]:
        """What each attached worker serves."""
        return [session.report for session in self._sessions.by_id.values()]

    def pin(self, digest: str) -> None:
        """Keep an adapter in its slot on every worker where it lies in one, those that attach later included."""
        self._pinned.add(digest)
        for session in self._sessions.by_id.values():
            session.set_pinned(self._pinned)

    def unpin(self, digest: str) -> None:
        """Allow the eviction of an adapter again. It need not be pinned."""
        self._pinned.discard(digest)
        for session in self._sessions.by_id.values():
            session.set_pinned(self._pinned)

    def placements(self, digest: str) -> list[str]:
        """Ids of the workers that hold the adapter's weights."""
        sessions = self._sessions.by_id.values()
        return sorted(s.worker_id for s in sessions if s.scheduler.adapter_use(digest).is_ready)

    def tick(self) -> None:
        """Let every session do what is due by time."""
        for session in list(self._sessions.by_id.values()):
            self._jobs.guard(session.tick)

    async def close(self) -> None:
        """End every session, and let no worker attach again."""
        self._is_closed = True
        for session in list(self._sessions.by_id.values()):
            session.end(EndCause.CLOSED, "the control plane is shutting down")
        await self._cache_warmer.close()

    # ---- for the sessions ----

    def on_outputs(self, session: WorkerSession, outputs: Outputs) -> None:
        """Carry what a session's scheduler returned to the streams."""
        self._delivery.on_outputs(session, outputs)

    def on_load(self, digest: str) -> bool:
        """Start filling the host cache with an adapter, without waiting for it. True if it is cached already."""
        is_cached = self._weights.is_cached(digest)
        self._cache_warmer.warm(digest)
        return is_cached

    def on_changed(self) -> None:
        """See whether an adapter that is being unloaded is out of use, and whether one that is preloaded is there."""
        self._unloads.check_soon()
        self._preloads.check_soon()

    def on_ended(self, session: WorkerSession) -> None:
        """Move the requests of a session that has ended."""
        self._note_end(session)
        was_taking = session.worker_id in self._sessions.taking
        self._sessions.close(session)
        # Accepted tokens reach their streams in any case: the requests go on from behind them.
        self._jobs.guard(lambda: self._delivery.on_outputs(session, session.scheduler.take_outputs()))
        jobs = [job for job in self._jobs.by_id.values() if job.session is session]
        try:
            finding = self._migration.take_back(session, jobs, is_final=self._is_closed)
            self._gate.note_end(session, finding.explained_epochs, is_requests_fault=finding.blames_suspects)
        except Exception:  # no request may wait for a session that has ended
            logger.exception("session not ended in order worker_id=%s epoch=%d", session.worker_id, session.epoch)
            for job in jobs:
                if self._is_stranded(job, session):
                    self._jobs.fail_broken(job)
            self._jobs.guard(self._dispatcher.place_waiting)
        if was_taking:
            self.begin_grace_without_workers()
        self.on_changed()
        self.report_change()

    def _note_end(self, session: WorkerSession) -> None:
        assert session.end_cause is not None, "a session ended without a cause"
        self._audit.event(
            actions.END_SESSION,
            f"workers/{session.worker_id}",
            caller=self._attached_by.pop(session.epoch),
            more={"epoch": session.epoch, "cause": session.end_cause.value},
        )

    def _is_stranded(self, job: Job, session: WorkerSession) -> bool:
        """Whether a job of an ended session is unfinished, and neither waits nor has another session."""
        request_id = job.request.request_id
        is_unfinished = request_id in self._jobs.by_id and request_id not in self._dispatcher.waiting
        return is_unfinished and (job.session is None or job.session is session)

    def begin_grace_without_workers(self) -> None:
        """Begin the grace without workers, if the last one that took requests is gone or drained."""
        if not self._sessions.taking:
            self._no_worker_since_s = self._awake()

    def report_change(self) -> None:
        """Call whoever wants to know that workers came, went or changed."""
        for callback in self._when_changed:
            callback()
