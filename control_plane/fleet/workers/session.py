"""One attached worker: its scheduler, its half of the plan stream, its heartbeats.

Events drive it: a received message, a change by the fleet, a tick. It does no I/O: messages wait in the outbox, which
the service writes to the stream. `receive` applies a result and makes the next plan before it returns.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Iterator, Set
from typing import Protocol

from motet.v1.status import WorkerStatus

from contract import common_protocol
from contract.plan_stream.unknown_fields import unknown_field
from contract.process_log import printable
from contract.v1 import plan_pb2
from control_plane.awake import AwakeClock
from control_plane.constraints.sent import SentConstraints
from control_plane.fleet.settings import FleetSettings
from control_plane.fleet.workers.adapter_loads import AdapterLoads
from control_plane.fleet.workers.endings import EndCause
from control_plane.fleet.workers.errors import GarbageResult
from control_plane.fleet.workers.outbox import Outbox
from control_plane.fleet.workers.overdue import WorkWatch
from control_plane.fleet.workers.progress import ProgressWatch
from control_plane.fleet.workers.reports import memory_of, report_of
from control_plane.fleet.workers.round_trip import RoundTrip
from control_plane.fleet.workers.step_record import StepRecord
from control_plane.fleet.workers.wire import PlanEncoder, limits_of
from control_plane.host_cache.base import CacheAddress
from control_plane.observers.timings import NO_TIMINGS, Timings
from control_plane.scheduler.errors import RequestNeverFits, ResultMismatch, SlotReportMismatch
from control_plane.scheduler.fairness import VirtualCounters
from control_plane.scheduler.scheduler import Scheduler
from control_plane.scheduler.types import (
    AdapterRef,
    LoadSlot,
    Outputs,
    Request,
    RequestId,
    Vocabulary,
)

logger = logging.getLogger(__name__)

# Messages that say how the worker is. What another release adds to them may be left out.
_REPORTS = frozenset({"heartbeat", "pong", "fault", "leave"})


class SessionOwner(Protocol):
    """What a session reports to."""

    def on_outputs(self, session: WorkerSession, outputs: Outputs) -> None:
        """Requests of the session gained tokens or ended."""

    def on_load(self, digest: str) -> bool:
        """The worker is sent a load of this adapter. True if the host cache has the adapter."""

    def on_changed(self) -> None:
        """A slot changed or a step is finished."""

    def on_ended(self, session: WorkerSession) -> None:
        """The session has ended, and its requests must move. Called once."""


class WorkerSession:
    """The control plane's view of one connection to a worker."""

    def __init__(
        self,
        hello: plan_pb2.Hello,
        epoch: int,
        settings: FleetSettings,
        owner: SessionOwner,
        host_cache: CacheAddress,
        clock: Callable[[], float],
        awake: AwakeClock,
        counters: VirtualCounters,
        refusal: Callable[[], str | None] = lambda: None,
        timings: Timings = NO_TIMINGS,
    ) -> None:
        """`refusal` says why the worker may not be attached at present; None if it may."""
        self._refusal = refusal
        self._timings = timings
        self.worker_id = hello.worker_id
        self.epoch = epoch
        self.limits = limits_of(hello, settings.plan_depth)
        self.scheduler = Scheduler(self.limits, settings.scheduler, counters)
        self.report = report_of(hello)
        self._device = hello.device
        self._memory = memory_of(hello)
        self._settings = settings
        self._owner = owner
        self._clock = clock
        self._awake = awake
        self._encoder = PlanEncoder(epoch, hello.vocab_size, hello.hidden_width)
        self._is_pump_due = False
        self._progress = ProgressWatch()
        self._work = WorkWatch(settings)
        self.hung_digest: str | None = None  # the adapter whose load did not end, where that ended the session

        self.outbox = Outbox()  # messages to the worker
        self.ended = asyncio.Event()
        self.end_cause: EndCause | None = None
        self.end_reason = ""

        self._begun_s = clock()
        self._last_heard_s = awake()
        self._round_trip = RoundTrip(settings.plan_depth, settings.min_plan_steps)
        self.steps = StepRecord()
        self._resident_bytes = 0
        self._sent_constraints = SentConstraints()
        self._loads = AdapterLoads(self.worker_id, self._work, owner.on_load, timings)
        protocol = common_protocol(hello.protocol_min, hello.protocol_max)
        assert protocol is not None, "check_hello comes first"
        self.outbox.send(
            plan_pb2.AttachResponse(
                welcome=plan_pb2.Welcome(
                    protocol=protocol,
                    epoch=epoch,
                    heartbeat_interval_ms=settings.heartbeat_interval_ms,
                    dead_after_ms=settings.dead_after_ms,
                    leave_after_ms=settings.leave_after_ms,
                    stuck_after_ms=round(settings.first_step_timeout_s * 1000),
                    plan_depth=settings.plan_depth,
                    host_cache_url=host_cache.url,
                    host_cache_needs_password=host_cache.needs_password,
                )
            )
        )
        self._ping(clock())

    def __repr__(self) -> str:
        return f"WorkerSession(worker_id={self.worker_id}, epoch={self.epoch}, end={self.end_reason or None})"

    @property
    def lasted_s(self) -> float:
        """Seconds since the session began."""
        return self._clock() - self._begun_s

    @property
    def is_death(self) -> bool:
        """Whether the session ended in a way that a request may have caused."""
        return self.end_cause is not None and self.end_cause.is_death

    # ---- the fleet's side ----

    def add(self, request: Request) -> None:
        """Take a request on. Raises RequestNeverFits."""
        self.scheduler.add(request)
        self._pump_soon()

    def refusal(self, request: Request) -> RequestNeverFits | None:
        """What `add` would raise."""
        return self.scheduler.refusal(request)

    def cancel(self, request_id: RequestId, index: int | None = None) -> None:
        """Drop a request, or one of its completions. Its blocks and slot are free once no plan in flight uses them."""
        self.scheduler.cancel(request_id, index)
        self._pump_soon()

    def withdraw(self, request_id: RequestId) -> Request | None:
        """Take back a request that waits for a row or is paused, with every accepted token. None if it has a row."""
        request = self.scheduler.withdraw(request_id)
        self._pump_soon()
        return request

    def pause(self, request_id: RequestId) -> None:
        """Do not schedule the request until `resume`."""
        if not self.ended.is_set():  # the scheduler's state may be inconsistent
            self.scheduler.pause(request_id)

    def resume(self, request_id: RequestId) -> None:
        """Schedule the request again."""
        self.scheduler.resume(request_id)
        self._pump_soon()

    def send_vocabulary(self, vocabulary: Vocabulary) -> None:
        """Have the worker read a vocabulary before any plan, so that the first constrained request delays no step."""
        for message in self._sent_constraints.messages_for_vocabulary(vocabulary):
            self.outbox.send(message)

    def set_pinned(self, digests: Set[str]) -> None:
        """Keep exactly these adapters from eviction, from when they are in a slot."""
        self.scheduler.set_pinned(digests)
        self._pump_soon()

    def preload(self, ref: AdapterRef, account: str) -> None:
        """Load an adapter before a request needs it; see scheduler/memory/preloads.py. The command is sent at once."""
        self.scheduler.preloads.begin(ref, account)
        self.pump()

    def end_preload(self, digest: str) -> None:
        """Give up a preload that has not ended."""
        if not self.ended.is_set():
            self.scheduler.preloads.end(digest)

    def purge_digest(self, digest: str) -> None:
        """Drop an adapter's cached blocks, and evict it from its slot once no live request uses it."""
        if self.scheduler.purge_digest(digest):
            self._pump_soon()

    def tick(self) -> None:
        """Do what is due: a ping, deadlines, and the end of the session if the worker is silent, refused or hangs."""
        now_s, awake_s = self._clock(), self._awake()
        silent_s = awake_s - self._last_heard_s
        if silent_s >= self._settings.dead_after_ms / 1000:
            self.end(EndCause.LOST, f"silent for {silent_s:.1f} s")
            return
        if (refusal := self._refusal()) is not None:
            logger.warning("worker refused worker_id=%s epoch=%d: %s", self.worker_id, self.epoch, refusal)
            self.end(EndCause.REFUSED, refusal)
            return
        if now_s - self._last_ping_s >= self._settings.heartbeat_interval_ms / 1000:
            self._ping(now_s)
        with self._edge():
            self._deliver_ends()  # deadlines and loads that will be tried again come up without a message
            self._pump()
            if self._progress.has_stalled(self.scheduler, awake_s):
                logger.error("scheduler stalled worker_id=%s %s", self.worker_id, self.scheduler.stats())
                self.end(EndCause.INTERNAL_ERROR, "the scheduler stalled: requests wait and no plan is in flight")
            elif (overdue := self._work.overdue(awake_s)) is not None:
                self.hung_digest = overdue.digest
                self.end(EndCause.HUNG_LOAD if overdue.digest else EndCause.HUNG_STEP, overdue.reason)

    def end(self, cause: EndCause, reason: str) -> None:
        """End the session, once."""
        if self.ended.is_set():
            return
        self.end_cause, self.end_reason = cause, reason
        self.ended.set()
        self.outbox.close()
        logger.info("worker session ended worker_id=%s epoch=%d: %s", self.worker_id, self.epoch, reason)
        self._owner.on_ended(self)

    # ---- the stream's side ----

    def receive(self, message: plan_pb2.AttachRequest) -> None:
        """Take one message of the worker; what follows from it is in the outbox on return."""
        if self.ended.is_set():
            return
        self._last_heard_s = self._awake()
        with self._edge():
            self._handle(message)

    def _handle(self, message: plan_pb2.AttachRequest) -> None:
        kind = message.WhichOneof("message")
        if kind not in _REPORTS and (field := unknown_field(message)) is not None:
            raise GarbageResult(f"{field} is not known to this release of the control plane")
        if kind == "step_result":
            self._on_result(message.step_result)
        elif kind == "slot_state":
            self._on_slot_state(message.slot_state)
        elif kind == "heartbeat":
            self._resident_bytes = message.heartbeat.resident_bytes
            self._work.heartbeat(message.heartbeat, self._last_heard_s)
        elif kind == "pong":
            round_trip_s = self._round_trip.pong(message.pong.sequence, self._clock())
            if round_trip_s is None:
                raise GarbageResult(f"pong {message.pong.sequence} belongs to no open ping")
            self._timings.round_trip(round_trip_s)
        elif kind == "fault":
            fault, reason = message.fault, printable(message.fault.reason)
            logger.error("worker fault worker_id=%s step_id=%d: %s", self.worker_id, fault.step_id, reason)
            self.end(EndCause.FAULT, f"fault in step {fault.step_id}: {reason}")
        elif kind == "leave":
            self.end(EndCause.LEFT, f"the worker left: {printable(message.leave.reason)}")
        else:
            raise GarbageResult(f"unexpected message {kind}")

    def _on_result(self, message: plan_pb2.StepResult) -> None:
        received_s = self._clock()
        result = self._encoder.decode_result(message)
        if result is None:
            return
        self.steps.step_finished(result, message.step_time_us)
        self._work.step_finished(message.step_time_us, self._last_heard_s)
        outputs = self.scheduler.apply(result)
        try:
            self._pump()  # before delivering: the worker waits, and the readers are woken later anyway
            self._round_trip.step(message.step_time_us, self._clock() - received_s)
        finally:
            # Accepted tokens reach their streams in any case: the requests go on from behind them.
            if outputs:
                self._owner.on_outputs(self, outputs)
        self._deliver_ends()
        self._owner.on_changed()

    def _on_slot_state(self, message: plan_pb2.SlotState) -> None:
        if message.epoch != self.epoch:
            return
        if outputs := self.scheduler.apply_slot_report(self._loads.report_of(message), self._clock()):
            self._owner.on_outputs(self, outputs)
        self._pump()
        self._deliver_ends()
        self._owner.on_changed()

    # ---- plans ----

    def pump(self) -> None:
        """Send every slot command, and every plan that the plan depth allows."""
        with self._edge():
            self._pump()
            self._deliver_ends()

    def _pump(self) -> None:
        self._is_pump_due = False
        if self.ended.is_set():
            return
        now_s = self._clock()
        self._send_commands()
        while (plan := self.scheduler.plan(now_s, self._round_trip.max_steps)) is not None:
            self._send_commands()
            self.steps.plan_sent(plan)
            num_decodes = len(plan.decode_rows)
            num_tokens = num_decodes + sum(num for _, num in plan.prefills)
            self._work.plan_sent(plan.num_steps, num_tokens, num_decodes, self._awake())
            for message in self._sent_constraints.messages_for(plan.new_rows):
                self.outbox.send(message)
            self.outbox.send(self._encoder.encode(plan))

    def _deliver_ends(self) -> None:
        """Report requests that ended without a result, those that a plan or a slot command ended included."""
        if not self.ended.is_set() and (outputs := self.scheduler.expire(self._clock())):
            self._owner.on_outputs(self, outputs)
            self._pump_soon()

    def _pump_soon(self) -> None:
        """Pump once after everything that happens in this turn of the loop: a burst of requests makes one plan."""
        if not self._is_pump_due:
            self._is_pump_due = True
            asyncio.get_running_loop().call_soon(self.pump_if_due)

    def pump_if_due(self) -> None:
        """Pump now if a pump is due after this turn of the loop."""
        if self._is_pump_due:
            self.pump()

    @contextlib.contextmanager
    def _edge(self) -> Iterator[None]:
        """End this session alone if anything goes wrong inside: its requests move on, the other workers live."""
        try:
            yield
        except (GarbageResult, ResultMismatch, SlotReportMismatch) as error:
            self.end(EndCause.GARBAGE, f"garbage from the worker: {error}")
        except Exception:
            logger.exception("session failed worker_id=%s epoch=%d", self.worker_id, self.epoch)
            self.end(EndCause.INTERNAL_ERROR, "an internal error of the control plane")

    def _send_commands(self) -> None:
        for command in self.scheduler.slot_commands():
            if isinstance(command, LoadSlot):
                self._loads.sent(command)
            self.outbox.send(self._encoder.encode_command(command))

    def _ping(self, now_s: float) -> None:
        self._last_ping_s = now_s
        self.outbox.send(plan_pb2.AttachResponse(ping=plan_pb2.Ping(sequence=self._round_trip.ping(now_s))))

    # ---- numbers ----

    def snapshot(self) -> WorkerStatus:
        """The worker at this moment."""
        return WorkerStatus(
            **self.scheduler.stats().reported(),
            worker_id=self.worker_id,
            device=self._device,
            **self._memory,
            epoch=self.epoch,
            num_steps=self.steps.num_steps,
            block_size=self.limits.block_size,
            arena_bytes=self.limits.arena_bytes,
            num_plans=self.steps.num_plans,
            max_plan_steps=self._round_trip.max_steps,
            round_trip_ms=self._round_trip.round_trip_s * 1000,
            step_time_ms=self.steps.step_time_ms,
            resident_bytes=self._resident_bytes,
            max_model_len=self.limits.max_model_len,
        )
