"""The worker's end of the plan stream: keeps a session with the control plane and feeds one engine.

Threads of one session: a reader (stream -> inbox, plan_stream.py), the caller's thread (inbox -> engine, in order),
loaders (adapter loads), a watch (session_watch.py). When a session ends for whatever reason the engine is reset and the
next one starts from nothing; nothing here survives a session but its epoch.
"""

from __future__ import annotations

import contextlib
import logging
import os
import random
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue

import grpc

from contract import PROTOCOL
from contract.v1 import plan_pb2, plan_pb2_grpc
from data_plane.errors import AdapterLoadError, AdapterMismatch, PlanRefused, SelfCheckFailed, WorkerError
from data_plane.plan import AdapterSource, Engine, StepOutput, StepPlan
from data_plane.spans import span
from data_plane.stream.plan_stream import Ended, InboxItem, Leave, PlanStream, Stop
from data_plane.stream.session_log import SessionLog
from data_plane.stream.session_watch import SessionWatch, WatchTimes, WorkInHand
from data_plane.wire import decode_steps, encode_hello, encode_output

logger = logging.getLogger(__name__)

BACKOFF_MIN_S = 0.1
BACKOFF_MAX_S = 1.0
WELCOME_TIMEOUT_S = 5.0
CLOSE_TIMEOUT_S = 5.0  # how long the control plane may take to end a stream that the worker ends
# A signal's handler runs between two bytecodes of the main thread. One that arrives while that thread gives up the
# interpreter's lock, on its way to wait for a plan, does not end the wait: it is seen when the wait ends by itself.
SIGNAL_DELAY_S = 1.0
MAX_MESSAGE_BYTES = 64 << 20  # a plan with many long prompts; pieces of adapters are 1 MiB
# Answers after which another try of this process cannot succeed.
_FATAL_CODES = {
    grpc.StatusCode.FAILED_PRECONDITION,  # another base model, dtype, protocol or store
    grpc.StatusCode.INVALID_ARGUMENT,  # a Hello that makes no sense
    grpc.StatusCode.UNIMPLEMENTED,  # not the worker port
}
_CHANNEL_OPTIONS = [
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.use_local_subchannel_pool", 1),  # weights must not share the plans' connection
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.enable_retries", 0),
]

# Where adapters come from in one session: the stub of the weights' channel, and Welcome's host_cache_url.
SourceFactory = Callable[[plan_pb2_grpc.WorkerServiceStub, str], AdapterSource]
ChannelFactory = Callable[[str], grpc.Channel]  # from HOST:PORT


def open_channel(address: str) -> grpc.Channel:
    """A channel to a control plane."""
    return grpc.insecure_channel(address, options=_CHANNEL_OPTIONS)


@dataclass(frozen=True, slots=True)
class PlanClientSettings:
    """How one worker attaches."""

    control_plane: str  # HOST:PORT
    worker_id: str
    load_threads: int = 2
    exit_when_disconnected_s: float | None = None  # seconds without a session; None: reconnect for ever


@dataclass
class _Session:
    """One session, from its Welcome on."""

    epoch: int
    stream: PlanStream
    source: AdapterSource
    loaders: ThreadPoolExecutor
    work: WorkInHand = field(default_factory=WorkInHand)
    last_step_id: int = 0
    is_closed: bool = False  # nothing more is to be sent


class PlanClient:
    """Attaches an engine to a control plane until stopped. `run` blocks; `stop` may be called from anywhere."""

    def __init__(
        self,
        engine: Engine,
        settings: PlanClientSettings,
        *,
        make_source: SourceFactory,
        open_channel: ChannelFactory = open_channel,
        on_ready: Callable[[int], None] = lambda _epoch: None,
        on_step: Callable[[StepPlan, StepOutput], None] = lambda _plan, _output: None,
        clock: Callable[[], float] = time.monotonic,
        rng: random.Random | None = None,
        check_self: Callable[[], None] = lambda: None,
        exit_process: Callable[[int], None] = os._exit,
    ) -> None:
        """`check_self` raises SelfCheckFailed where the engine computes wrongly: called once other workers say so.

        `exit_process` ends the process at once, where a thread of it is stuck.
        """
        self._engine = engine
        self._settings = settings
        self._make_source = make_source
        self._open_channel = open_channel
        self._on_ready = on_ready  # called with the epoch of each session
        self._on_step = on_step  # called when a step has been answered
        self._clock = clock
        self._rng = rng or random.Random(settings.worker_id)
        self._log = SessionLog(settings.worker_id, settings.control_plane, clock)
        self._is_stopping = False  # no Event: a signal handler may have interrupted who holds its lock
        self._inbox: SimpleQueue[InboxItem] = SimpleQueue()
        self._check_self = check_self
        self._exit_process = exit_process
        self._last_epoch = 0  # of the latest session, and so the highest
        self.num_sessions = 0

    def stop(self) -> None:
        """Ask `run` to return after the step in hand. Safe in a signal handler and from any thread."""
        self._is_stopping = True
        self._inbox.put(Stop())

    def run(self) -> int:
        """Serve until stopped or drained; the process exit code.

        1: the control plane refuses this worker for good, or stayed away for exit_when_disconnected_s. 2: it computes
        wrongly.
        """
        backoff_s = BACKOFF_MIN_S
        disconnected_s = self._clock()
        while not self._is_stopping:
            num_sessions = self.num_sessions
            ended = self._attach()
            had_session = self.num_sessions > num_sessions
            if had_session:
                backoff_s, disconnected_s = BACKOFF_MIN_S, self._clock()
            if ended is None or self._is_stopping:
                return 0
            if ended.code in _FATAL_CODES:
                logger.error("refused by the control plane worker_id=%s: %s", self._settings.worker_id, ended.reason)
                return 1
            if ended.code is grpc.StatusCode.DATA_LOSS and not self._is_sound():
                return 2
            limit_s = self._settings.exit_when_disconnected_s
            if limit_s is not None and self._clock() - disconnected_s >= limit_s:
                logger.error("no control plane at %s for %.1f s", self._settings.control_plane, limit_s)
                return 1
            if had_session:
                self._log.session_ended(ended)
            else:
                self._log.not_attached(ended)
            self._rest(backoff_s * self._rng.uniform(0.5, 1.0))
            backoff_s = min(backoff_s * 2, BACKOFF_MAX_S)
        return 0

    def _is_sound(self) -> bool:
        """Whether the engine computes rightly, as far as it can be seen from here."""
        try:
            self._check_self()
        except SelfCheckFailed as error:
            logger.critical("self-check failed worker_id=%s: %s", self._settings.worker_id, error)
            return False
        return True

    def _rest(self, time_s: float) -> None:
        """Wait between sessions, or until a stop."""
        inbox: SimpleQueue[InboxItem] = SimpleQueue()
        self._inbox = inbox
        if not self._is_stopping:
            with contextlib.suppress(Empty):
                inbox.get(timeout=time_s)

    # ---- one session ----

    def _attach(self) -> Ended | None:
        """Open a session and serve it to its end; None after a drain or a stop."""
        with (
            self._open_channel(self._settings.control_plane) as channel,
            self._open_channel(self._settings.control_plane) as weights_channel,
        ):
            inbox: SimpleQueue[InboxItem] = SimpleQueue()
            self._inbox = inbox
            if self._is_stopping:
                return None
            stream = PlanStream(_stub(channel).Attach, self._settings.control_plane, inbox, self._clock)
            stream.send(encode_hello(self._engine.capacities, self._settings.worker_id, self._last_epoch))
            reader = threading.Thread(target=stream.read, name="plan-reader", daemon=True)
            welcome_timer = threading.Timer(WELCOME_TIMEOUT_S, stream.cancel)
            welcome_timer.daemon = True
            reader.start()
            welcome_timer.start()
            try:
                first = inbox.get()
                welcome_timer.cancel()
                if isinstance(first, Stop):
                    return None
                if isinstance(first, Ended):
                    return first
                assert isinstance(first, plan_pb2.AttachResponse), "a session is left before it began"
                refusal = self._check_welcome(first)
                if refusal is not None:
                    return refusal
                source = self._make_source(_stub(weights_channel), first.welcome.host_cache_url)
                return self._serve(first.welcome, stream, source, weights_channel)
            finally:
                welcome_timer.cancel()
                welcome_timer.join()
                stream.close_outbox()
                stream.cancel()
                reader.join()

    def _check_welcome(self, message: plan_pb2.AttachResponse) -> Ended | None:
        if message.WhichOneof("message") != "welcome":
            return Ended(f"the first message is {message.WhichOneof('message')}, not a welcome")
        welcome = message.welcome
        if welcome.protocol != PROTOCOL:
            return Ended(f"the control plane speaks protocol {welcome.protocol}, this worker {PROTOCOL}")
        if welcome.epoch <= self._last_epoch:
            return Ended(
                f"epoch {welcome.epoch} is not above {self._last_epoch}, which this worker served already: an older "
                "control plane, or one with another store; restart this worker if it shall follow"
            )
        interval_ms, leave_ms, stuck_ms = (
            welcome.heartbeat_interval_ms,
            welcome.leave_after_ms,
            welcome.stuck_after_ms,
        )
        if interval_ms < 1 or leave_ms <= interval_ms or stuck_ms < 1:
            return Ended(f"heartbeats of {interval_ms} ms, leave after {leave_ms} ms, stuck after {stuck_ms} ms")
        self._last_epoch = welcome.epoch
        return None

    def _serve(
        self, welcome: plan_pb2.Welcome, stream: PlanStream, source: AdapterSource, weights_channel: grpc.Channel
    ) -> Ended | None:
        """From the Welcome to the end of the session. The engine is empty before and after."""
        session = _Session(
            epoch=welcome.epoch,
            stream=stream,
            source=source,
            loaders=ThreadPoolExecutor(self._settings.load_threads, thread_name_prefix="adapter-load"),
        )
        times = WatchTimes(
            heartbeat_interval_s=welcome.heartbeat_interval_ms / 1000,
            leave_after_s=welcome.leave_after_ms / 1000,
            stuck_after_s=welcome.stuck_after_ms / 1000,
        )
        watch = SessionWatch(
            stream, session.work, times, lambda: self._numbers(stream), self._clock, self._exit_process
        )
        watch_thread = threading.Thread(target=watch.run, name="plan-watch", daemon=True)
        watch_thread.start()
        self.num_sessions += 1
        self._log.attached(session.epoch)
        self._on_ready(session.epoch)
        try:
            return self._execute(session)
        finally:
            session.is_closed = True
            watch.close()
            # 1. Nothing more reaches the stream. 2. Loads that wait for the control plane fail. 3. The engine forgets
            # everything.
            stream.close_outbox()
            stream.cancel()
            weights_channel.close()
            session.loaders.shutdown(wait=True, cancel_futures=True)
            self._engine.reset()
            self._engine.slots.clear()
            watch.finish()
            watch_thread.join()

    def _execute(self, session: _Session) -> Ended | None:
        """The compute thread's loop: messages in the order of the stream."""
        while True:
            with span("wait for a plan"):
                item = _next_of(session.stream.inbox)
            if isinstance(item, Ended):
                return item
            if isinstance(item, Leave):
                self._close(session, item.reason)
                return Ended(item.reason)
            if isinstance(item, Stop):
                self._close(session, "the worker was asked to stop")
                return None
            kind = item.WhichOneof("message")
            if kind == "drain":
                logger.info("drained worker_id=%s: %s", self._settings.worker_id, item.drain.reason)
                self._is_stopping = True
                self._close(session, "the worker was drained")
                return None
            try:
                self._handle(session, kind, item)
            except Exception as error:  # the loop's edge: the session ends, the worker lives
                step_id = item.step_plan.step_id if kind == "step_plan" else 0
                reason = f"{type(error).__name__}: {error}"
                if not isinstance(error, WorkerError):
                    logger.exception("engine failed epoch=%d step_id=%d", session.epoch, step_id)
                fault = plan_pb2.Fault(reason=reason[:2000], step_id=step_id)
                session.stream.send(plan_pb2.AttachRequest(fault=fault))
                self._wait_for_end(session)
                return Ended(f"fault in step {step_id}: {reason}")

    def _handle(self, session: _Session, kind: str | None, item: plan_pb2.AttachResponse) -> None:
        if kind == "step_plan":
            plan = item.step_plan
            self._check_epoch(session, plan.epoch)
            if plan.step_id != session.last_step_id + 1:
                raise PlanRefused(f"step {plan.step_id} after step {session.last_step_id}")
            with span("decode the plan"):
                steps = decode_steps(plan)
            for step in steps:
                session.last_step_id = step.step_id
                session.work.step = step.step_id, self._clock()
                with span("step"):
                    output = self._engine.execute(step)
                session.work.step = None
                with span("encode the result"):
                    session.stream.send(encode_output(output, session.epoch))
                session.work.num_steps += 1
                self._on_step(step, output)
        elif kind == "load_adapter":
            self._check_epoch(session, item.load_adapter.epoch)
            session.loaders.submit(self._load, session, item.load_adapter)
        elif kind == "evict_adapter":
            evict = item.evict_adapter
            self._check_epoch(session, evict.epoch)
            self._engine.slots.evict(evict.slot, evict.generation)
            session.stream.send(self._slot_state(session, evict.slot, evict.generation, state="STATE_EMPTY"))
        else:
            raise PlanRefused(f"unexpected message {kind}")

    def _check_epoch(self, session: _Session, epoch: int) -> None:
        if epoch != session.epoch:
            raise PlanRefused(f"epoch {epoch} in a session of epoch {session.epoch}")

    def _close(self, session: _Session, reason: str) -> None:
        """Leave: without a word from the worker, the end of its stream would be taken for its death."""
        session.stream.send(plan_pb2.AttachRequest(leave=plan_pb2.Leave(reason=reason)))
        self._wait_for_end(session)

    def _wait_for_end(self, session: _Session) -> None:
        """Half-close, and let what is in the outbox leave before the stream is cut.

        The control plane ends the stream once it read the last message; one that is silent does not.
        """
        session.stream.close_outbox()
        deadline_s = self._clock() + CLOSE_TIMEOUT_S
        while (left_s := deadline_s - self._clock()) > 0:
            try:
                if isinstance(session.stream.inbox.get(timeout=left_s), Ended):
                    return
            except Empty:
                return

    # ---- beside the compute thread ----

    def _load(self, session: _Session, load: plan_pb2.LoadAdapter) -> None:
        """Fill a slot on a loader thread and report it."""
        start_s = self._clock()
        session.work.loads[load.slot, load.generation] = start_s
        state, reason, is_retryable, is_mismatch = "STATE_READY", "", False, False
        try:
            with span("load an adapter"):
                self._engine.slots.load(load.slot, load.generation, load.digest, session.source)
        except AdapterLoadError as error:
            state, reason, is_retryable = "STATE_FAILED", f"{type(error).__name__}: {error}", error.is_retryable
            is_mismatch = isinstance(error, AdapterMismatch)
        except Exception as error:  # the thread's edge: a failed load must not look like a running one
            logger.exception("adapter load failed digest=%s slot=%d", load.digest, load.slot)
            state, reason = "STATE_FAILED", f"{type(error).__name__}: {error}"
        finally:
            session.work.loads.pop((load.slot, load.generation), None)
        if state == "STATE_FAILED":
            logger.warning("adapter load failed digest=%s slot=%d: %s", load.digest, load.slot, reason)
        if session.is_closed:
            return
        message = self._slot_state(session, load.slot, load.generation, state=state, digest=load.digest)
        message.slot_state.reason = reason[:2000]
        message.slot_state.retryable = is_retryable
        message.slot_state.mismatch = is_mismatch
        message.slot_state.load_time_us = int((self._clock() - start_s) * 1e6)
        session.stream.send(message)

    def _slot_state(
        self, session: _Session, slot: int, generation: int, *, state: str, digest: str = ""
    ) -> plan_pb2.AttachRequest:
        return plan_pb2.AttachRequest(
            slot_state=plan_pb2.SlotState(
                slot=slot,
                generation=generation,
                digest=digest,
                state=state,
                arena_used_bytes=self._engine.slots.used_bytes(),
                epoch=session.epoch,
            )
        )

    def _numbers(self, stream: PlanStream) -> plan_pb2.Heartbeat:
        """What a heartbeat tells beside the work in hand."""
        return plan_pb2.Heartbeat(
            num_plans_waiting=min(stream.inbox.qsize(), 2**31),
            arena_used_bytes=self._engine.slots.used_bytes(),
            resident_bytes=resident_bytes(),
        )


def _next_of(inbox: SimpleQueue[InboxItem]) -> InboxItem:
    """Wait for the next item."""
    while True:
        with contextlib.suppress(Empty):
            return inbox.get(timeout=SIGNAL_DELAY_S)


def _stub(channel: grpc.Channel) -> plan_pb2_grpc.WorkerServiceStub:
    return plan_pb2_grpc.WorkerServiceStub(channel)  # type: ignore[no-untyped-call]  # generated without types


def resident_bytes() -> int:
    """Resident memory of this process; 0 where the system does not tell."""
    try:
        with open("/proc/self/statm", encoding="ascii") as file:  # noqa: PTH123 - read twice a second
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0
