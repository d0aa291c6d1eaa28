"""Carries what the schedulers return to the streams of the requests, and what readers cancel back to the sessions."""

from __future__ import annotations

import logging
from collections.abc import Callable

from control_plane.errors import MotetError
from control_plane.fleet.placement.dispatcher import Dispatcher
from control_plane.fleet.placement.migration import Migration
from control_plane.fleet.requests.failures import error_of
from control_plane.fleet.requests.jobs import Job
from control_plane.fleet.requests.quotas import TenantQuotas
from control_plane.fleet.requests.streams import JobStream
from control_plane.fleet.requests.unfinished import UnfinishedJobs
from control_plane.fleet.slow_readers import SlowReaders
from control_plane.fleet.workers.session import WorkerSession
from control_plane.scheduler.types import FinishReason, Outputs, Request, RequestId, RequestOutput

logger = logging.getLogger(__name__)

# Ends of one completion that it reached by itself; any other ends the request with an error.
_ENDS = (FinishReason.LENGTH, FinishReason.STOP_TOKEN, FinishReason.POOLED)


class Delivery:
    """Between schedulers and streams. Keeps nothing itself."""

    def __init__(
        self,
        jobs: UnfinishedJobs,
        dispatcher: Dispatcher,
        migration: Migration,
        slow_readers: SlowReaders,
        quotas: TenantQuotas,
        damage: Callable[[str], MotetError | None],
    ) -> None:
        """`damage`: the error for an adapter, by digest, whose stored weights were found wrong."""
        self._jobs = jobs
        self._dispatcher = dispatcher
        self._migration = migration
        self._slow_readers = slow_readers
        self._quotas = quotas
        self._damage = damage

    def stream_for(self, request: Request) -> JobStream:
        """A stream for the request's tokens, which takes what its reader does back to the fleet."""
        request_id = request.request_id
        return JobStream(
            lambda: self._slow_readers.on_read(request_id),
            lambda: self._cancel(request_id),
            lambda index: self._cancel_index(request_id, index),
            num_indices=request.num_indices,
        )

    def on_outputs(self, session: WorkerSession, outputs: Outputs) -> None:
        """Carry what a session's scheduler returned to the streams."""
        jobs = self._jobs.by_id
        for request_id, token_id in outputs.tokens:
            job = jobs.get(request_id)
            if job is None or job.session is not session:
                continue  # cancelled meanwhile
            try:
                if job.deliver(token_id):
                    self._slow_readers.pause(job)
            except Exception:  # a mistake of ours costs one request, not all that follow
                self._jobs.fail_broken(job)
        for output in outputs.others:
            job = jobs.get(output.request_id)
            if job is not None and job.session is session:
                try:
                    _note_place(job, session, output)
                    self._deliver(job, output)
                except Exception:  # as above
                    self._jobs.fail_broken(job)
        self._jobs.guard(self._dispatcher.clear_survivors)

    def _deliver(self, job: Job, output: RequestOutput) -> None:
        if not job.has_run and output.first_scheduled_s is not None:
            job.start()
            job.stream.describe(
                output.num_cached_tokens, output.first_scheduled_s - job.request.arrival_s, _adapter_wait_s(job, output)
            )
            self._quotas.start(job.charge)
        if job.not_finite_at and (output.token_ids or output.pooled is not None):
            self._migration.on_finite(job)
        job.count_tokens(len(output.token_ids))
        job.note_searched(output.num_searched)
        stream, reason = job.stream, output.finish_reason
        if reason is None or reason in _ENDS:
            if not stream.is_live(output.index):
                return  # cancelled meanwhile
            stream.push(output, reason)
            if stream.has_ended:
                self._jobs.finish(job)
            elif stream.is_full:
                self._slow_readers.pause(job)
            return
        if output.token_ids and stream.is_live(output.index):
            stream.push(output, None)
        if reason is FinishReason.ADAPTER_FAILED:
            assert output.request is not None, "a load failed, and the request is not given back"
            if self._migration.try_elsewhere(job, output.request, is_crowded_out=output.is_crowded_out):
                return
            if output.is_crowded_out:  # the sizes of pinned adapters are the operator's to know
                logger.info("no room beside pinned adapters request_id=%d: %s", output.request_id, output.message)
        if reason is FinishReason.NOT_FINITE:
            assert output.request is not None, "logits are not finite, and the request is not given back"
            if self._migration.check_elsewhere(job, output.request):
                return
        self._jobs.fail(job, error_of(output, job.request, self._damage))

    def _cancel(self, request_id: RequestId) -> None:
        job = self._jobs.by_id.get(request_id)
        if job is not None:
            session = job.session
            if session is not None:
                progress = session.scheduler.progress(request_id)
                if progress is not None:
                    job.note_searched(progress.num_searched)
                    _note_place(job, session, progress)
                session.cancel(request_id)
            self._jobs.finish(job)

    def _cancel_index(self, request_id: RequestId, index: int) -> None:
        job = self._jobs.by_id.get(request_id)
        if job is not None:
            if job.session is not None:
                job.session.cancel(request_id, index)
            else:
                job.drop_index(index)


def _adapter_wait_s(job: Job, output: RequestOutput) -> float | None:
    """From the arrival until the adapter was loaded; 0 where it was loaded before."""
    if output.adapter_ready_s is None:
        return None
    return max(output.adapter_ready_s - job.request.arrival_s, 0.0)


def _note_place(job: Job, session: WorkerSession, output: RequestOutput) -> None:
    if output.first_scheduled_s is not None:
        job.stream.note_place(session.worker_id, session.epoch, output.slot)
