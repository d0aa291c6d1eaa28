"""Watches one session from a thread of its own: sends heartbeats, notices a silent control plane, ends a stuck process.

A thread that hangs in a step or a load cannot be stopped from within its process. After the session's end a stuck
worker exits, and its supervisor starts it again; it does not attach before that.
"""

from __future__ import annotations

import faulthandler
import logging
import os
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

import grpc

from contract.v1 import plan_pb2
from data_plane.stream.plan_stream import Leave, PlanStream

logger = logging.getLogger(__name__)

EXIT_STUCK = 3  # status of a process that could not end a session
# How long the thread may take to return after the control plane found that its step or load hangs, seconds.
HUNG_GRACE_S = 10.0
# A longer delay between two looks means that this process was stopped and could not receive, seconds.
MAX_DELAY_S = 1.0


@dataclass
class WorkInHand:
    """What the threads of a session are doing: written by those that do it, read by the watch.

    Each change is one operation of a dictionary, so that no reader sees half of it.
    """

    steps: dict[int, float] = field(default_factory=dict)  # step_id -> since when, the oldest first
    num_steps: int = 0  # executed
    loads: dict[tuple[int, int], float] = field(default_factory=dict)  # (slot, generation) -> since when

    @property
    def step(self) -> tuple[int, float] | None:
        """The step that is executed, and since when."""
        return next(iter(list(self.steps.items())), None)

    def end_step(self, step_id: int, now_s: float) -> None:
        """A step ended: the next one, if it was submitted already, is executed from now on."""
        self.steps.pop(step_id, None)
        self.num_steps += 1
        if (following := self.step) is not None:
            self.steps[following[0]] = now_s


class LeaveReason(Protocol):
    """Says why a session should end now; None: it should not. Idle: no step since the last look."""

    def __call__(self, *, is_idle: bool) -> str | None: ...


@dataclass(frozen=True, slots=True)
class WatchTimes:
    """The times in the Welcome, seconds."""

    heartbeat_interval_s: float
    leave_after_s: float  # without a message from the control plane
    stuck_after_s: float


class SessionWatch:
    """Watches one session. `run` needs a thread of its own, from the session's beginning until `finish`."""

    def __init__(
        self,
        stream: PlanStream,
        work: WorkInHand,
        times: WatchTimes,
        make_heartbeat: Callable[[], plan_pb2.Heartbeat],
        clock: Callable[[], float],
        exit_process: Callable[[int], None] = os._exit,
        leave_reason: LeaveReason | None = None,
    ) -> None:
        """`make_heartbeat` gives the fields of a heartbeat beside the work in hand.

        `leave_reason` says why the session should end now, if it should.
        """
        self._stream = stream
        self._work = work
        self._times = times
        self._make_heartbeat = make_heartbeat
        self._clock = clock
        self._exit_process = exit_process
        self._leave_reason = leave_reason
        self._num_steps = -1  # executed at the last look
        self._looked_s = clock()
        self._over_s: float | None = None  # when this watch found the session to be over
        self._is_closed = False
        self._finished = threading.Event()

    def run(self) -> None:
        """Look at every heartbeat interval."""
        while not self._finished.wait(self._times.heartbeat_interval_s):
            self.look()

    def close(self) -> None:
        """The session is over: the step and the loads in hand must end."""
        self._is_closed = True

    def finish(self) -> None:
        """Everything of the session has ended."""
        self._finished.set()

    def look(self) -> None:
        """Send a heartbeat, leave the session, or exit a stuck process, whichever is due."""
        now_s = self._clock()
        delay_s = now_s - self._looked_s - self._times.heartbeat_interval_s
        self._looked_s = now_s
        if delay_s > MAX_DELAY_S:  # this process was stopped: messages sent meanwhile are not read yet
            self._stream.heard_s = now_s
            if self._over_s is not None:
                self._over_s += delay_s
        if self._over_s is None and (self._is_closed or self._stream.ended is not None):
            self._over_s = now_s
        if self._over_s is not None:
            self._give_up_if_stuck(now_s - self._over_s)
            return
        silent_s = now_s - self._stream.heard_s
        is_idle = self._work.step is None and self._work.num_steps == self._num_steps
        self._num_steps = self._work.num_steps
        reason = None if self._leave_reason is None else self._leave_reason(is_idle=is_idle)
        if silent_s >= self._times.leave_after_s:
            reason = f"the control plane was silent for {silent_s:.1f} s"
        if reason is not None:
            self._over_s = now_s
            self._stream.inbox.put(Leave(reason))
            return
        self._stream.send(plan_pb2.AttachRequest(heartbeat=self._heartbeat(now_s)))

    def _heartbeat(self, now_s: float) -> plan_pb2.Heartbeat:
        heartbeat, step = self._make_heartbeat(), self._work.step
        heartbeat.num_steps = self._work.num_steps
        if step is not None:
            heartbeat.step_id, heartbeat.step_age_ms = step[0], _milliseconds(now_s - step[1])
        for (slot, generation), since_s in list(self._work.loads.items()):
            heartbeat.loads.add(slot=slot, generation=generation, age_ms=_milliseconds(now_s - since_s))
        return heartbeat

    def _give_up_if_stuck(self, over_s: float) -> None:
        """Exit where the session has been over for too long, and a thread still works on it."""
        ended = self._stream.ended
        is_hung = ended is not None and ended.code is grpc.StatusCode.DEADLINE_EXCEEDED  # the control plane's finding
        if over_s < (HUNG_GRACE_S if is_hung else self._times.stuck_after_s):
            return
        step, loads = self._work.step, sorted(self._work.loads)
        logger.critical(
            "stuck, exiting: the session is over for %.1f s step_id=%s loads=%s: %s",
            *(over_s, step[0] if step else None, loads, ended.reason if ended else "the worker left"),
        )
        faulthandler.dump_traceback(file=sys.stderr, all_threads=True)
        self._exit_process(EXIT_STUCK)


def _milliseconds(seconds: float) -> int:
    return max(0, int(seconds * 1000))
