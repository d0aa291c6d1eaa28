"""Keeps one engine attached to a control plane: opens a session, and another one when it ends.

Owns the connection, the checks of the Welcome and the waiting times between sessions; session.py serves a session. Only
the last epoch survives a session: the next one starts with an empty engine.
"""

from __future__ import annotations

import contextlib
import logging
import os
import random
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from queue import Empty, SimpleQueue

import grpc
from motet.tls import TlsError, TlsFiles, handshake_error

from contract import OLDEST_PROTOCOL, PROTOCOL
from contract.plan_stream.unknown_fields import unknown_field
from contract.v1 import plan_pb2, plan_pb2_grpc
from data_plane.config import TLS_FLAGS
from data_plane.errors import SelfCheckFailed
from data_plane.plan import AdapterSource, Engine, StepOutput, StepPlan
from data_plane.stream.plan_stream import Ended, InboxItem, PlanStream, Stop
from data_plane.stream.renewal import CertificateRenewal
from data_plane.stream.session import Session
from data_plane.stream.session_log import SessionLog
from data_plane.wire import encode_hello

logger = logging.getLogger(__name__)

BACKOFF_MIN_S = 0.1
BACKOFF_MAX_S = 1.0
WELCOME_TIMEOUT_S = 5.0
MAX_MESSAGE_BYTES = 64 << 20  # a plan with many long prompts; pieces of adapters are 1 MiB
# How a stream may end. FATAL: another attempt of this process cannot succeed, so that the process exits.
FATAL_CODES = frozenset(
    {
        grpc.StatusCode.FAILED_PRECONDITION,  # another base model, dtype, protocol or store
        grpc.StatusCode.INVALID_ARGUMENT,  # the control plane does not accept the Hello
        grpc.StatusCode.UNIMPLEMENTED,  # not the worker port
    }
)
# RETRYABLE: the worker attaches again. Every code of gRPC is in one of the two.
RETRYABLE_CODES = frozenset(
    {
        grpc.StatusCode.ABORTED,
        grpc.StatusCode.ALREADY_EXISTS,
        grpc.StatusCode.CANCELLED,
        grpc.StatusCode.DATA_LOSS,  # other workers compute other tokens: only after check_self
        grpc.StatusCode.DEADLINE_EXCEEDED,  # the control plane found a step or a load that hangs
        grpc.StatusCode.INTERNAL,
        grpc.StatusCode.NOT_FOUND,
        grpc.StatusCode.OK,
        grpc.StatusCode.OUT_OF_RANGE,
        grpc.StatusCode.PERMISSION_DENIED,
        grpc.StatusCode.RESOURCE_EXHAUSTED,
        grpc.StatusCode.UNAUTHENTICATED,
        grpc.StatusCode.UNAVAILABLE,
        grpc.StatusCode.UNKNOWN,
    }
)
_CHANNEL_OPTIONS = [
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.use_local_subchannel_pool", 1),  # weights must not share the plans' connection
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.enable_retries", 0),
]

# Where adapters come from in one session: the stub of the weights' channel, and what Welcome says of the host cache.
SourceFactory = Callable[[plan_pb2_grpc.WorkerServiceStub, plan_pb2.Welcome], AdapterSource]
ChannelFactory = Callable[[str], grpc.Channel]  # from HOST:PORT


def channel_factory(files: TlsFiles | None) -> ChannelFactory:
    """Makes channels to a control plane: each one from what the files of TLS say by then. It may raise TlsError."""

    def open_channel(address: str) -> grpc.Channel:
        if files is None:
            return grpc.insecure_channel(address, options=_CHANNEL_OPTIONS)
        return grpc.secure_channel(address, files.credentials(), options=_CHANNEL_OPTIONS)

    return open_channel


@dataclass(frozen=True, slots=True)
class PlanClientSettings:
    """How one worker attaches."""

    control_plane: str  # HOST:PORT
    worker_id: str
    load_threads: int = 2
    tls_files: TlsFiles | None = None  # None: a connection without TLS
    exit_when_disconnected_s: float | None = None  # seconds without a session; None: reconnect for ever


class PlanClient:
    """Attaches an engine to a control plane until stopped. `run` blocks; `stop` may be called from anywhere."""

    def __init__(
        self,
        engine: Engine,
        settings: PlanClientSettings,
        *,
        make_source: SourceFactory,
        open_channel: ChannelFactory | None = None,
        on_ready: Callable[[int], None] = lambda _epoch: None,
        on_step: Callable[[StepPlan, StepOutput], None] = lambda _plan, _output: None,
        on_load: Callable[[float, bool], None] = lambda _seconds, _is_ready: None,
        clock: Callable[[], float] = time.monotonic,
        rng: random.Random | None = None,
        check_self: Callable[[], None] = lambda: None,
        exit_process: Callable[[int], None] = os._exit,
    ) -> None:
        """`check_self` raises SelfCheckFailed if the engine computes wrong values. It is called after the control plane
        found that other workers disagree with this one.

        `exit_process` ends the process at once, where one of its threads is stuck.
        """
        self._engine = engine
        self._settings = settings
        self._make_source = make_source
        self._open_channel = open_channel or channel_factory(settings.tls_files)
        self._on_ready = on_ready  # called with the epoch of each session
        self._on_step = on_step  # called when a step's result was sent
        self._on_load = on_load  # called in loader threads, see Session
        self.is_attached = False  # while a session is served
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
        """Make `run` return after the step in hand. Safe in a signal handler and from any thread."""
        self._is_stopping = True
        self._inbox.put(Stop())

    def run(self) -> int:
        """Serve until the worker is to stop; the process exit code.

        1: the control plane refuses this worker for good, or was away for exit_when_disconnected_s. 2: the self-check
        failed.
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
            if ended.code in FATAL_CODES:
                logger.error("refused by the control plane worker_id=%s: %s", self._settings.worker_id, ended.reason)
                return 1
            assert ended.code is None or ended.code in RETRYABLE_CODES, f"{ended.code} is in no list of codes"
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
            self._wait(backoff_s * self._rng.uniform(0.5, 1.0))
            backoff_s = min(backoff_s * 2, BACKOFF_MAX_S)
        return 0

    def _is_sound(self) -> bool:
        """Whether check_self finds nothing wrong."""
        try:
            self._check_self()
        except SelfCheckFailed as error:
            logger.critical("self-check failed worker_id=%s: %s", self._settings.worker_id, error)
            return False
        return True

    def _wait(self, time_s: float) -> None:
        """Wait between sessions, or until a stop."""
        inbox: SimpleQueue[InboxItem] = SimpleQueue()
        self._inbox = inbox
        if not self._is_stopping:
            with contextlib.suppress(Empty):
                inbox.get(timeout=time_s)

    # ---- one session ----

    def _attach(self) -> Ended | None:
        """Open a session and serve it to its end; None if the worker is to stop."""
        try:
            renewal = None if self._settings.tls_files is None else CertificateRenewal(self._settings.tls_files)
            plans = self._open_channel(self._settings.control_plane)
            weights = self._open_channel(self._settings.control_plane)
        except TlsError as error:  # half-written perhaps
            return Ended(str(error))
        with plans as channel, weights as weights_channel:
            inbox: SimpleQueue[InboxItem] = SimpleQueue()
            self._inbox = inbox
            if self._is_stopping:
                return None
            stream = PlanStream(_stub(channel).Attach, self._settings.control_plane, inbox, self._clock, self._explain)
            stream.send(encode_hello(self._engine.capacities, self._settings.worker_id, self._last_epoch))
            reader = threading.Thread(target=stream.read, name="plan-reader", daemon=True)
            welcome_timer = threading.Timer(WELCOME_TIMEOUT_S, stream.cancel)
            welcome_timer.name, welcome_timer.daemon = "welcome-timer", True
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
                source = self._make_source(_stub(weights_channel), first.welcome)
                session = Session(
                    self._engine,
                    first.welcome,
                    stream,
                    source,
                    load_threads=self._settings.load_threads,
                    close_source=weights_channel.close,
                    on_step=self._on_step,
                    on_load=self._on_load,
                    clock=self._clock,
                    exit_process=self._exit_process,
                    leave_reason=None if renewal is None else renewal.reason,
                )
                self.num_sessions += 1
                self._log.attached(session.epoch)
                self._on_ready(session.epoch)
                self.is_attached = True
                try:
                    return session.serve()
                finally:
                    self.is_attached = False
            finally:
                welcome_timer.cancel()
                welcome_timer.join()
                stream.close_outbox()
                stream.cancel()
                reader.join()

    def _explain(self, details: str) -> str | None:
        """gRPC's text for a connection that failed, where TLS is the reason."""
        files = self._settings.tls_files
        return handshake_error(
            details,
            has_tls=files is not None,
            has_certificate=files is not None and files.cert is not None,
            names=TLS_FLAGS,
        )

    def _check_welcome(self, message: plan_pb2.AttachResponse) -> Ended | None:
        if message.WhichOneof("message") != "welcome":
            return Ended(f"the first message is {message.WhichOneof('message')}, not a welcome")
        welcome = message.welcome
        if not OLDEST_PROTOCOL <= welcome.protocol <= PROTOCOL:
            return Ended(
                f"the control plane chose protocol {welcome.protocol}, and this worker speaks "
                f"{OLDEST_PROTOCOL} to {PROTOCOL}"
            )
        if (field := unknown_field(welcome)) is not None:
            return Ended(f"{field}, of protocol {welcome.protocol}, is not known to this release of the worker")
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


def _stub(channel: grpc.Channel) -> plan_pb2_grpc.WorkerServiceStub:
    return plan_pb2_grpc.WorkerServiceStub(channel)  # type: ignore[no-untyped-call]  # generated without types
