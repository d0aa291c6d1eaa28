"""One session with the control plane, from its Welcome to its end: messages in order into the engine, results back.

Threads: the caller's (inbox -> engine), loaders (adapter loads), a watch (session_watch.py) and one that waits for a
device's results (step_results.py), beside the reader that fills the inbox (plan_stream.py). The engine is empty before
and after a session.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from queue import Empty

from contract.plan_stream.unknown_fields import unknown_field
from contract.v1 import plan_pb2
from data_plane.errors import AdapterLoadError, AdapterMismatch, PlanRefused, WorkerError
from data_plane.plan import AdapterSource, Engine, StepOutput, StepPlan
from data_plane.spans import span
from data_plane.stream.constraints import SessionConstraints
from data_plane.stream.plan_stream import Ended, Failed, InboxItem, Leave, PlanStream, Stop
from data_plane.stream.row_log import RowLog
from data_plane.stream.session_watch import LeaveReason, SessionWatch, WatchTimes, WorkInHand
from data_plane.stream.step_results import StepFailed, StepResults
from data_plane.wire import decode_steps, encode_output

logger = logging.getLogger(__name__)

CLOSE_TIMEOUT_S = 5.0  # how long the control plane may take to end a stream that the worker ends
# A signal's handler runs between two bytecodes of the main thread. A signal that arrives while that thread releases
# the lock of the interpreter, on its way to wait for a plan, does not end the wait: the handler runs after the wait.
SIGNAL_DELAY_S = 1.0


class Session:
    """One session. `serve` blocks until the session ends."""

    def __init__(
        self,
        engine: Engine,
        welcome: plan_pb2.Welcome,
        stream: PlanStream,
        source: AdapterSource,
        *,
        load_threads: int,
        close_source: Callable[[], None],
        on_step: Callable[[StepPlan, StepOutput], None],
        on_load: Callable[[float, bool], None],
        clock: Callable[[], float],
        exit_process: Callable[[int], None],
        leave_reason: LeaveReason | None = None,
    ) -> None:
        """`close_source` makes loads fail that wait for the control plane; `on_step` gets each step that was executed.
        `on_load` gets the seconds that each load took, and whether the adapter is ready; called in loader threads.

        `exit_process` ends the process at once, where one of its threads is stuck. `leave_reason`: see SessionWatch.
        """
        self.epoch = welcome.epoch
        self._engine = engine
        self._stream = stream
        self._source = source
        self._close_source = close_source
        self._on_step = on_step
        self._on_load = on_load
        self._clock = clock
        self._work = WorkInHand()
        times = WatchTimes(
            heartbeat_interval_s=welcome.heartbeat_interval_ms / 1000,
            leave_after_s=welcome.leave_after_ms / 1000,
            stuck_after_s=welcome.stuck_after_ms / 1000,
        )
        self._watch = SessionWatch(stream, self._work, times, self._heartbeat, clock, exit_process, leave_reason)
        self._loaders = ThreadPoolExecutor(load_threads, thread_name_prefix="adapter-load")
        self._constraints = SessionConstraints()
        self._row_log = RowLog(self.epoch, engine.capacities.max_rows)
        self._results = StepResults(self._send_results, on_failure=lambda: stream.inbox.put(Failed()))
        self._last_step_id = 0
        self._is_closed = False  # nothing more is to be sent

    def serve(self) -> Ended | None:
        """Serve to the session's end; None if the worker is to stop."""
        watch_thread = threading.Thread(target=self._watch.run, name="plan-watch", daemon=True)
        watch_thread.start()
        try:
            return self._execute()
        finally:
            self._is_closed = True
            self._watch.close()
            # 1. Nothing more reaches the stream. 2. Loads that wait for the control plane fail. 3. The engine forgets
            # everything.
            self._stream.close_outbox()
            self._stream.cancel()
            self._close_source()
            self._loaders.shutdown(wait=True, cancel_futures=True)
            self._results.close()
            self._row_log.close()
            self._engine.reset()
            self._engine.slots.clear()
            self._watch.finish()
            watch_thread.join()

    # ---- the compute thread ----

    def _execute(self) -> Ended | None:
        """Handle messages in the order of the stream."""
        while True:
            with span("wait for a plan"):
                item = self._next_item()
            if isinstance(item, Ended):
                return item
            if isinstance(item, Leave):
                self._close(item.reason)
                return Ended(item.reason)
            if isinstance(item, Stop):
                self._close("the worker stops")
                return None
            step_id = 0
            try:
                if isinstance(item, Failed):
                    self._results.raise_failure()
                    continue
                kind = item.WhichOneof("message")
                step_id = item.step_plan.step_id if kind == "step_plan" else 0
                self._handle(kind, item)
            except StepFailed as failed:
                return self._fail(failed.error, failed.step_id)
            except Exception as error:  # the loop's edge: the session ends, the worker lives
                return self._fail(error, step_id)

    def _next_item(self) -> InboxItem:
        while True:
            with contextlib.suppress(Empty):
                return self._stream.inbox.get(timeout=SIGNAL_DELAY_S)

    def _handle(self, kind: str | None, item: plan_pb2.AttachResponse) -> None:
        if (field := unknown_field(item)) is not None:  # to leave it out may compute something else than was planned
            raise PlanRefused(f"{field} is not known to this release of the worker")
        if kind == "step_plan":
            self._run_steps(item.step_plan)
        elif kind == "load_adapter":
            self._check_epoch(item.load_adapter.epoch)
            self._loaders.submit(self._load, item.load_adapter)
        elif kind == "evict_adapter":
            evict = item.evict_adapter
            self._check_epoch(evict.epoch)
            self._engine.slots.evict(evict.slot, evict.generation)
            self._stream.send(self._slot_state(evict.slot, evict.generation, state="STATE_EMPTY"))
        elif kind == "put_vocabulary":
            self._engine.read_vocabulary(self._constraints.put_vocabulary(item.put_vocabulary))
        elif kind == "put_grammar":
            self._constraints.put_grammar(item.put_grammar)
        elif kind == "forget_constraints":
            self._constraints.forget(list(item.forget_constraints.digests))
        else:
            raise PlanRefused(f"unexpected message {kind}")

    def _run_steps(self, plan: plan_pb2.StepPlan) -> None:
        self._check_epoch(plan.epoch)
        if plan.step_id != self._last_step_id + 1:
            raise PlanRefused(f"step {plan.step_id} after step {self._last_step_id}")
        with span("decode the plan"):
            steps = decode_steps(plan, self._constraints.of)
        for step in steps:
            self._row_log.begin(step)
            self._last_step_id = step.step_id
            self._work.steps[step.step_id] = self._clock()
            with span("step"):
                pending = self._engine.submit(step)
            self._results.add(step, pending)

    def _send_results(self, step: StepPlan, output: StepOutput) -> None:
        """Called on the compute thread or on the one that waited for the results (StepResults)."""
        with span("encode the result"):
            self._stream.send(encode_output(output, self.epoch))
        self._work.end_step(step.step_id, self._clock())
        self._on_step(step, output)
        self._row_log.count(step, output)

    def _check_epoch(self, epoch: int) -> None:
        if epoch != self.epoch:
            raise PlanRefused(f"epoch {epoch} in a session of epoch {self.epoch}")

    def _fail(self, error: Exception, step_id: int) -> Ended:
        """Report the error and end the session. The results of earlier steps leave first."""
        self._results.wait_for_all()
        reason = f"{type(error).__name__}: {error}"
        if not isinstance(error, WorkerError):
            logger.error("engine failed epoch=%d step_id=%d", self.epoch, step_id, exc_info=error)
        fault = plan_pb2.Fault(reason=reason[:2000], step_id=step_id)
        self._stream.send(plan_pb2.AttachRequest(fault=fault))
        self._wait_for_end()
        return Ended(f"fault in step {step_id}: {reason}")

    def _close(self, reason: str) -> None:
        """Send a Leave and end the session. Without a Leave the control plane would count the worker as dead. The
        results of steps under way leave first."""
        self._results.wait_for_all()
        self._stream.send(plan_pb2.AttachRequest(leave=plan_pb2.Leave(reason=reason)))
        self._wait_for_end()

    def _wait_for_end(self) -> None:
        """Half-close, and let what is in the outbox leave before the stream is cut.

        The control plane ends the stream once it has read the last message, unless it is silent.
        """
        self._stream.close_outbox()
        deadline_s = self._clock() + CLOSE_TIMEOUT_S
        while (left_s := deadline_s - self._clock()) > 0:
            try:
                if isinstance(self._stream.inbox.get(timeout=left_s), Ended):
                    return
            except Empty:
                return

    # ---- loaders and the watch ----

    def _load(self, load: plan_pb2.LoadAdapter) -> None:
        """Fill a slot on a loader thread and report it."""
        start_s = self._clock()
        self._work.loads[load.slot, load.generation] = start_s
        state, reason, is_retryable, is_mismatch = "STATE_READY", "", False, False
        try:
            with span("load an adapter"):
                self._engine.slots.load(load.slot, load.generation, load.digest, self._source)
        except AdapterLoadError as error:
            state, reason, is_retryable = "STATE_FAILED", f"{type(error).__name__}: {error}", error.is_retryable
            is_mismatch = isinstance(error, AdapterMismatch)
        except Exception as error:  # the thread's edge: a failed load must not look like a running one
            logger.exception("adapter load failed digest=%s slot=%d", load.digest, load.slot)
            state, reason = "STATE_FAILED", f"{type(error).__name__}: {error}"
        finally:
            self._work.loads.pop((load.slot, load.generation), None)
        if state == "STATE_FAILED":
            logger.warning("adapter load failed digest=%s slot=%d: %s", load.digest, load.slot, reason)
        load_time_s = self._clock() - start_s
        self._on_load(load_time_s, state == "STATE_READY")
        if self._is_closed:
            return
        message = self._slot_state(load.slot, load.generation, state=state, digest=load.digest)
        message.slot_state.reason = reason[:2000]
        message.slot_state.retryable = is_retryable
        message.slot_state.mismatch = is_mismatch
        message.slot_state.load_time_us = int(load_time_s * 1e6)
        self._stream.send(message)

    def _slot_state(self, slot: int, generation: int, *, state: str, digest: str = "") -> plan_pb2.AttachRequest:
        return plan_pb2.AttachRequest(
            slot_state=plan_pb2.SlotState(
                slot=slot,
                generation=generation,
                digest=digest,
                state=state,
                arena_used_bytes=self._engine.slots.used_bytes(),
                epoch=self.epoch,
            )
        )

    def _heartbeat(self) -> plan_pb2.Heartbeat:
        """What a heartbeat reports beside the work in hand."""
        return plan_pb2.Heartbeat(
            num_plans_waiting=min(self._stream.inbox.qsize(), 2**31),
            arena_used_bytes=self._engine.slots.used_bytes(),
            resident_bytes=resident_bytes(),
        )


def resident_bytes() -> int:
    """Resident memory of this process; 0 where the system does not report it."""
    try:
        with open("/proc/self/statm", encoding="ascii") as file:  # noqa: PTH123 - read twice a second
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0
