"""All workers as one: takes requests, carries their tokens to streams, and ends what has to end.

Owns every unfinished request; which worker runs it is the dispatcher's business. Called by the API (submit, retire,
drain), by the worker service (attach) and by the sessions (outputs, end). Everything happens on one event loop; time
comes from the clock, and whatever is due by time is done in `tick`.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections import Counter
from collections.abc import Callable
from functools import partial

from contract.v1 import plan_pb2
from control_plane.awake import AwakeClock
from control_plane.errors import DeadlineExceeded, Draining, MotetError, NoWorker, QueueFull, SlowConsumer
from control_plane.fleet.cache_warmer import CacheWarmer, WeightsLike
from control_plane.fleet.dispatcher import Dispatcher
from control_plane.fleet.endings import EndCause
from control_plane.fleet.failures import broken, error_of, no_worker_came
from control_plane.fleet.fencing import WorkerGate
from control_plane.fleet.hello import BaseModelLike
from control_plane.fleet.jobs import MAX_UNREAD_TOKENS, Job, JobStream
from control_plane.fleet.quotas import TenantQuotas, TenantUse
from control_plane.fleet.retirement import Retirement
from control_plane.fleet.session import WorkerSession
from control_plane.fleet.settings import FleetSettings, QueueSnapshot, WorkerSnapshot
from control_plane.fleet.slow_readers import SlowReaders
from control_plane.registry.model.served_modules import WorkerReport
from control_plane.scheduler.fairness import VirtualCounters
from control_plane.scheduler.types import FinishReason, Outputs, Request, RequestId, RequestOutput

logger = logging.getLogger(__name__)

TICK_S = 0.1
MAX_TOLD_TENANTS = 256  # in a status: names come from outside and have no end


class Fleet:
    """Every attached worker and every unfinished request. Make it inside a running event loop."""

    def __init__(
        self,
        settings: FleetSettings,
        base_model: BaseModelLike,
        weights: WeightsLike,
        incarnation: int,
        clock: Callable[[], float] = time.monotonic,
        *,
        ticks_by_itself: bool = True,
    ) -> None:
        self.settings = settings
        self._gate = WorkerGate(settings, base_model, incarnation, clock)
        self._weights = weights
        self._clock = clock
        self._awake = AwakeClock(clock)  # for all that is judged by silence
        self._jobs: dict[RequestId, Job] = {}
        self._dispatcher = Dispatcher(settings, self._jobs, weights.is_cached, self._fail, self._awake)
        self._sessions = self._dispatcher.sessions  # at hand; by worker id
        self._quotas = TenantQuotas(settings.tenants, clock)
        self._counters = VirtualCounters(
            {tenant: limits.weight for tenant, limits in settings.tenants.named.items()},
            default_weight=settings.tenants.default.weight,
        )
        self._slow_readers = SlowReaders(settings.slow_reader_timeout_s, self._awake)
        self._request_ids = itertools.count(1)
        self._no_worker_since_s = self._awake()  # meaningful while there is no session
        self._pinned: set[str] = set()  # digests
        self._retirement = Retirement(self._sessions, self._jobs)
        self._cache_warmer = CacheWarmer(weights)
        self._workers_changed: list[Callable[[], None]] = []
        self._is_draining = self._is_closed = False
        self._idle = asyncio.Event()
        self._drain_until_s: float | None = None
        self._num_accepted = self._num_finished = self._num_rejected = 0
        self._tick_handle: asyncio.TimerHandle | None = None
        if ticks_by_itself:
            self._tick_later()

    def __repr__(self) -> str:
        num_waiting = len(self._dispatcher.waiting)
        return f"Fleet(workers={sorted(self._sessions)}, requests={len(self._jobs)}, waiting={num_waiting})"

    # ---- requests ----

    def next_request_id(self) -> RequestId:
        """An id that no other request of this process has."""
        return RequestId(next(self._request_ids))

    def submit(self, request: Request) -> JobStream:
        """Take a request on; its tokens come through the stream.

        Raises Draining, NoWorker, QueueFull, QuotaExceeded, QuotaTooSmall, ContextTooLong or AdapterTooLarge.
        """
        self._check_admission(request.account)
        request_id = request.request_id
        assert request_id not in self._jobs, f"request id {request_id} is in use"
        stream = JobStream(
            lambda: self._on_read(request_id),
            lambda: self._cancel(request_id),
            lambda index: self._cancel_index(request_id, index),
            num_indices=request.num_indices,
        )
        job = Job(request, stream, self._quotas.admit(request))
        self._jobs[request_id] = job
        try:
            error = self._dispatcher.add(job)
            if error is not None:
                raise error
        except BaseException:
            self._quotas.withdraw(job.charge)
            self._forget(job)
            raise
        self._num_accepted += 1
        return stream

    def account_of(self, tenant: str, host: str) -> str:
        """The account that a request is charged to which a host sends for a tenant."""
        return self.settings.tenants.account_of(tenant, host)

    def check_room(self, account: str, num_reserved_tokens: int) -> None:
        """Raise what `submit` would raise at present for every request of the account that may generate so many tokens.

        For a caller whose prompt is costly to make: it is refused before, and may still be refused after.
        """
        self._check_admission(account)
        self._quotas.check(account, 1, num_reserved_tokens)

    def _check_admission(self, account: str) -> None:
        if self._is_draining:
            raise Draining("the server is shutting down; try another one or try again in a moment")
        if not self._sessions and self._awake() - self._no_worker_since_s >= self.settings.worker_grace_s:
            raise NoWorker("no worker is attached; try again in a moment")
        if self._is_queue_full():
            for session in list(self._sessions.values()):
                session.pump_if_due()  # what arrived in this turn of the loop may run already
            if self._num_waiting() >= self.settings.max_waiting_requests:
                waiting = Counter(self._counters.num_waiting_by_tenant)
                waiting.update(job.request.account for job in self._dispatcher.waiting.values())
                self._check_share(account, waiting, self.settings.max_waiting_requests, "requests")
            if self._quotas.num_queued_tokens >= self.settings.max_waiting_tokens:
                waiting = Counter(self._quotas.queued_tokens_by_tenant())
                self._check_share(account, waiting, self.settings.max_waiting_tokens, "prompt tokens")

    def _is_queue_full(self) -> bool:
        has_many_tokens = self._quotas.num_queued_tokens >= self.settings.max_waiting_tokens
        return has_many_tokens or self._num_waiting() >= self.settings.max_waiting_requests

    def _check_share(self, account: str, waiting: Counter[str], limit: int, what: str) -> None:
        """Of a full queue every account that waits may hold its share, `limit` over their number, and no more.

        So one that keeps the queue full shuts nobody out. Shares shrink as accounts come and are nothing beyond
        `limit` accounts: limit x (1 + ln limit) wait at the very most, and what the last request of each is beyond it.
        """
        share = limit // len(waiting.keys() | {account})
        if waiting[account] >= share:
            self._num_rejected += 1
            raise QueueFull(
                f"{limit} {what} wait already, the most this server holds, and {waiting[account]} of them are tenant "
                f"{account}'s, whose share is {share}; try again in a moment"
            )

    def _num_waiting(self) -> int:
        return len(self._dispatcher.waiting) + sum(s.scheduler.num_waiting for s in self._sessions.values())

    # ---- tokens ----

    def on_outputs(self, session: WorkerSession, outputs: Outputs) -> None:
        """Carry what a scheduler returned to the streams."""
        for request_id, token_id in outputs.tokens:
            job = self._jobs.get(request_id)
            if job is None or job.session is not session:
                continue  # cancelled meanwhile
            try:
                job.num_tokens_here += 1
                job.num_generated += 1
                if job.stream.push_token(token_id):
                    self._check_reader(job)
            except Exception:  # a mistake of ours costs one request, not all that follow
                self._break(job)
        for output in outputs.others:
            job = self._jobs.get(output.request_id)
            if job is not None and job.session is session:
                try:
                    self._deliver(job, output)
                except Exception:  # as above
                    self._break(job)
        self._try(self._dispatcher.judge)

    def _deliver(self, job: Job, output: RequestOutput) -> None:
        if not job.has_run and output.first_scheduled_s is not None:
            job.has_run = True
            job.stream.describe(output.num_cached_tokens, output.first_scheduled_s - job.request.arrival_s)
            self._quotas.start(job.charge)
        if job.not_finite_at and output.token_ids:
            self._dispatcher.refute(job)
        job.num_tokens_here += len(output.token_ids)
        job.num_generated += len(output.token_ids)
        job.num_searched = max(job.num_searched, output.num_searched)
        stream, reason = job.stream, output.finish_reason
        if reason is None or reason in (FinishReason.LENGTH, FinishReason.STOP_TOKEN):
            if not stream.is_live(output.index):
                return  # given up meanwhile
            stream.push(output, reason)
            if stream.has_ended:
                self._finish(job)
            elif stream.is_full:
                self._check_reader(job)
            return
        if output.token_ids and stream.is_live(output.index):
            stream.push(output, None)
        if output.finish_reason is FinishReason.ADAPTER_FAILED:
            assert output.request is not None, "a load failed, and the request is not given back"
            if self._dispatcher.try_elsewhere(job, output.request):
                return
        if output.finish_reason is FinishReason.NOT_FINITE:
            assert output.request is not None, "logits are not finite, and the request is not given back"
            if self._dispatcher.ask_another(job, output.request):
                return
        self._fail(job, error_of(output, job.request, self._weights.damage))

    def _check_reader(self, job: Job) -> None:
        """Schedule a job no more until its reader, who is far behind, has read."""
        if not self._dispatcher.is_isolated(job):
            self._slow_readers.hold(job)

    def _on_read(self, request_id: RequestId) -> None:
        job = self._slow_readers.release(request_id)
        if job is not None and job.session is not None:
            job.session.resume(request_id)
        elif job is not None:
            self._dispatcher.place_waiting()  # a suspect does not run while nobody reads

    def _cancel(self, request_id: RequestId) -> None:
        job = self._jobs.get(request_id)
        if job is not None:
            if job.session is not None:
                job.num_searched = max(job.num_searched, job.session.scheduler.num_searched(request_id))
                job.session.cancel(request_id)
            self._finish(job)

    def _cancel_index(self, request_id: RequestId, index: int) -> None:
        job = self._jobs.get(request_id)
        if job is not None:
            if job.session is not None:
                job.session.cancel(request_id, index)
            else:
                job.request = job.request.without_index(index)

    def _fail(self, job: Job, error: MotetError) -> None:
        """End a job with an error; its session, if any, has dropped it already or is told by the caller."""
        job.stream.fail(error)
        self._finish(job)

    def _break(self, job: Job) -> None:
        """End a job in whose handling a mistake of ours was raised just now; the others live."""
        request_id, session = job.request.request_id, job.session
        logger.exception("request broken request_id=%d", request_id)
        if session is not None:
            self._try(lambda: session.cancel(request_id))
        if not job.stream.has_ended:
            self._try(lambda: job.stream.fail(broken()))
        if request_id in self._jobs:
            self._try(lambda: self._finish(job))

    def _try(self, act: Callable[[], None], job: Job | None = None) -> None:
        """Do one of several things; where it breaks, the job that it is about ends, and the others are done."""
        try:
            act()
        except Exception:
            if job is None:
                logger.exception("fleet failed")
            else:
                self._break(job)

    def _finish(self, job: Job) -> None:
        self._num_finished += 1
        # A beam search delivers at its end only: who gives it up pays what was computed till then.
        self._quotas.end(job.charge, max(job.num_generated, job.num_searched))
        self._forget(job)

    def _forget(self, job: Job) -> None:
        request_id = job.request.request_id
        del self._jobs[request_id]
        self._slow_readers.forget(request_id)
        if not self._jobs:
            self._idle.set()
        self._dispatcher.forget(job)
        self._retirement.check_soon()

    # ---- workers ----

    @property
    def num_workers(self) -> int:
        """Workers attached."""
        return len(self._sessions)

    @property
    def is_serving(self) -> bool:
        """Whether requests can be expected to run: some worker is attached. One that hangs or stalls is so no more."""
        return bool(self._sessions)

    def attach(self, hello: plan_pb2.Hello) -> WorkerSession:
        """A session for the worker that said this; an earlier one of the same process is over with it.

        Raises Draining, or what WorkerGate.admit raises.
        """
        if self._is_closed:
            raise Draining("the control plane is shutting down")
        former = self._sessions.get(hello.worker_id)
        epoch = self._gate.admit(hello, former)
        session = WorkerSession(
            hello, epoch, self.settings, self, self._weights.worker_url, self._clock, self._awake, self._counters
        )
        session.set_pinned(self._pinned)
        self._sessions[hello.worker_id] = session
        logger.info("worker attached worker_id=%s epoch=%d", session.worker_id, epoch)
        if former is not None:
            former.end(EndCause.CLOSED, "its worker attached anew")
        if hello.last_epoch:
            self._dispatcher.outlived(hello.worker_id, hello.last_epoch)
        self._dispatcher.place_waiting()
        self._tell_workers_changed()
        return session

    def on_ended(self, session: WorkerSession) -> None:
        """Move the requests of a session that is over."""
        self._dispatcher.close(session)
        # What was accepted reaches its streams in any case: the requests move on from behind it.
        self._try(lambda: self.on_outputs(session, session.scheduler.take_outputs()))
        jobs = [job for job in self._jobs.values() if job.session is session]
        try:
            verdict = self._dispatcher.take_back(session, jobs, is_final=self._is_closed)
            self._gate.note_end(session, verdict)
        except Exception:  # nobody may wait for a session that is over
            logger.exception("session not ended in order worker_id=%s epoch=%d", session.worker_id, session.epoch)
            for job in jobs:
                if self._is_stranded(job, session):
                    self._break(job)
            self._try(self._dispatcher.place_waiting)
        if not self._sessions:
            self._no_worker_since_s = self._awake()
        self._retirement.check_soon()
        self._tell_workers_changed()

    def _is_stranded(self, job: Job, session: WorkerSession) -> bool:
        """Whether nobody would bring this unfinished job of an ended session to its end."""
        request_id = job.request.request_id
        is_open = request_id in self._jobs and request_id not in self._dispatcher.waiting
        return is_open and (job.session is None or job.session is session)

    def on_load(self, digest: str) -> bool:
        """Have the adapter in the host cache by the time its worker looks there; the load does not wait for it.

        Whether it is there already.
        """
        is_cached = self._weights.is_cached(digest)
        self._cache_warmer.warm(digest)
        return is_cached

    def on_changed(self) -> None:
        """See whether an adapter that is being retired is out of use."""
        self._retirement.check_soon()

    def on_workers_changed(self, callback: Callable[[], None]) -> None:
        """Have `callback` called after a worker attached or was lost."""
        self._workers_changed.append(callback)

    def _tell_workers_changed(self) -> None:
        for callback in self._workers_changed:
            callback()

    def reports(self) -> list[WorkerReport]:
        """What each attached worker serves."""
        return [session.report for session in self._sessions.values()]

    # ---- adapters ----

    def placements(self, digest: str) -> list[str]:
        """Ids of the workers that hold the adapter's weights."""
        return sorted(s.worker_id for s in self._sessions.values() if s.scheduler.adapter_use(digest).is_ready)

    def pin(self, digest: str) -> None:
        """Keep an adapter in its slot on every worker where it lies in one, those that attach later included."""
        self._pinned.add(digest)
        for session in self._sessions.values():
            session.set_pinned(self._pinned)

    def unpin(self, digest: str) -> None:
        """Allow its eviction again; not pinned is fine."""
        self._pinned.discard(digest)
        for session in self._sessions.values():
            session.set_pinned(self._pinned)

    async def retire(self, digest: str) -> None:
        """Drop an adapter from every worker; returns once nothing uses or holds it, or `keep` was called."""
        await self._retirement.retire(digest)

    def keep(self, digest: str) -> None:
        """Stop retiring an adapter: another name uses it now."""
        self._retirement.keep(digest)

    # ---- time ----

    def tick(self) -> None:
        """Do what is due: heartbeats, deadlines, slow readers, the grace without workers, the end of a drain."""
        now_s, awake_s = self._clock(), self._awake()
        for session in list(self._sessions.values()):
            self._try(session.tick)
        self._try(self._dispatcher.judge)  # a beam search gains tokens without an output
        self._try(self._dispatcher.empty_for_suspects)
        self._try(self._dispatcher.level)
        for job in list(self._dispatcher.waiting.values()):
            if job.request.deadline_s is not None and now_s >= job.request.deadline_s:
                error = DeadlineExceeded("the deadline passed before a worker could take the request")
                self._try(partial(self._fail, job, error), job)
        if not self._sessions and awake_s - self._no_worker_since_s >= self.settings.worker_grace_s:
            for job in list(self._dispatcher.waiting.values()):
                self._try(partial(self._fail, job, no_worker_came(job, self.settings.worker_grace_s)), job)
        for job in self._slow_readers.overdue():
            self._try(partial(self._end_slow_reader, job), job)
        if self._drain_until_s is not None and now_s >= self._drain_until_s:
            self._idle.set()

    def _end_slow_reader(self, job: Job) -> None:
        if job.session is not None:
            job.session.cancel(job.request.request_id)
        timeout_s = self.settings.slow_reader_timeout_s
        self._fail(job, SlowConsumer(f"{MAX_UNREAD_TOKENS} tokens were not read for {timeout_s:g} s; read faster"))

    def _tick_later(self) -> None:
        self._tick_handle = asyncio.get_running_loop().call_later(TICK_S, self._tick_and_again)

    def _tick_and_again(self) -> None:
        try:
            self.tick()
        except Exception:  # the loop's edge: the next tick must come
            logger.exception("tick failed")
        self._tick_later()

    # ---- the end ----

    async def drain(self, timeout_s: float) -> None:
        """Take nothing more, and return when every request has ended or after the time; those left are ended."""
        self._is_draining = True
        self._drain_until_s = self._clock() + timeout_s
        if self._jobs and timeout_s > 0:
            self._idle.clear()
            await self._idle.wait()
        for job in list(self._jobs.values()):
            if job.session is not None:
                job.session.cancel(job.request.request_id)
            self._fail(job, Draining("the server shut down before the request ended; send it again"))

    async def close(self) -> None:
        """End every request and session; workers reconnect to whoever listens next."""
        await self.drain(0)
        self._is_closed = True
        if self._tick_handle is not None:
            self._tick_handle.cancel()
        for session in list(self._sessions.values()):
            session.end(EndCause.CLOSED, "the control plane is shutting down")
        await self._cache_warmer.close()

    # ---- numbers ----

    def worker_snapshots(self) -> list[WorkerSnapshot]:
        """Every attached worker, ordered by id."""
        return [self._sessions[worker_id].snapshot() for worker_id in sorted(self._sessions)]

    @property
    def num_tenants(self) -> int:
        """Tenants that sent requests lately."""
        return self._quotas.num_tenants

    def tenant_use(self) -> list[TenantUse]:
        """The busiest of them, by name."""
        return self._quotas.busiest(MAX_TOLD_TENANTS)

    def queue_snapshot(self) -> QueueSnapshot:
        """Requests over all workers."""
        num_waiting = self._num_waiting()
        return QueueSnapshot(
            num_requests=len(self._jobs),
            num_waiting=num_waiting,
            num_running=sum(s.scheduler.stats().num_running for s in self._sessions.values()),
            num_accepted=self._num_accepted,
            num_finished=self._num_finished,
            num_rejected=self._num_rejected,
            num_migrated=self._dispatcher.num_migrated,
        )
