"""What a session's watch does at each look, by a clock that the test moves."""

from __future__ import annotations

from collections.abc import Iterator
from queue import SimpleQueue
from typing import Any

import grpc
import pytest

from contract.v1 import plan_pb2
from data_plane.stream.plan_stream import Ended, InboxItem, Leave, PlanStream
from data_plane.stream.session_watch import EXIT_STUCK, HUNG_GRACE_S, SessionWatch, WatchTimes, WorkInHand
from tests.fakes.fleet_rig import FakeClock

TIMES = WatchTimes(heartbeat_interval_s=0.5, leave_after_s=10.0, stuck_after_s=60.0)


class Rig:
    """A watch over a stream that goes nowhere."""

    def __init__(self) -> None:
        self.clock = FakeClock()
        self.inbox: SimpleQueue[InboxItem] = SimpleQueue()
        self.stream = PlanStream(self._open, "127.0.0.1:1", self.inbox, self.clock)
        self.work = WorkInHand()
        self.exits: list[int] = []
        self.idle: list[bool] = []  # what the reason to leave got at each look
        self.reason: str | None = None
        self.watch = SessionWatch(
            self.stream,
            self.work,
            TIMES,
            lambda: plan_pb2.Heartbeat(resident_bytes=5),
            self.clock,
            self.exits.append,
            self._leave_reason,
        )

    def _open(self, requests: Iterator[plan_pb2.AttachRequest], /) -> Any:
        self.requests = requests

    def _leave_reason(self, *, is_idle: bool) -> str | None:
        self.idle.append(is_idle)
        return self.reason

    def look_for(self, seconds: float, *, is_heard: bool = False) -> None:
        """Look at every interval of this time; `is_heard`: the control plane sends pings."""
        for _ in range(round(seconds / TIMES.heartbeat_interval_s)):
            self.clock.advance(TIMES.heartbeat_interval_s)
            if is_heard:
                self.stream.heard_s = self.clock()
            self.watch.look()

    def heartbeats(self) -> list[plan_pb2.Heartbeat]:
        """Those sent; nothing is sent after this."""
        self.stream.close_outbox()
        return [request.heartbeat for request in self.requests]


def test_a_heartbeat_reports_the_work_in_hand_and_its_age() -> None:
    rig = Rig()
    rig.look_for(0.5)
    rig.work.num_steps, rig.work.steps = 3, {4: rig.clock()}
    rig.work.loads[2, 7] = rig.clock()
    rig.look_for(1.0)
    rig.work.steps.clear()
    rig.work.loads.clear()
    rig.look_for(0.5)
    first, *busy, last = rig.heartbeats()
    assert (first.step_id, first.num_steps, list(first.loads), first.resident_bytes) == (0, 0, [], 5)
    assert [(beat.step_id, beat.step_age_ms, beat.num_steps) for beat in busy] == [(4, 500, 3), (4, 1000, 3)]
    assert busy[1].loads[0] == plan_pb2.LoadInHand(slot=2, generation=7, age_ms=1000)
    assert (last.step_id, last.step_age_ms, list(last.loads)) == (0, 0, [])


def test_a_silent_control_plane_is_left_after_its_time_and_not_before() -> None:
    rig = Rig()
    rig.look_for(5.0, is_heard=True)
    rig.look_for(9.5)
    assert rig.inbox.empty()
    rig.look_for(0.5)
    assert rig.inbox.get_nowait() == Leave("the control plane was silent for 10.0 s")
    rig.look_for(5.0)
    assert rig.inbox.empty(), "it leaves once"


def test_a_worker_that_was_stopped_itself_does_not_take_the_control_plane_for_silent() -> None:
    rig = Rig()
    rig.look_for(5.0)
    rig.clock.advance(60.0)  # what was sent meanwhile lies unread
    rig.look_for(9.5)
    assert rig.inbox.empty()


def test_a_step_that_the_control_plane_gave_up_and_that_goes_on_ends_the_process(
    caplog: pytest.LogCaptureFixture,
) -> None:
    rig = Rig()
    rig.work.steps[9] = rig.clock()
    rig.look_for(40.0, is_heard=True)
    assert rig.exits == []
    rig.stream.ended = Ended("DEADLINE_EXCEEDED: step 9 hangs", grpc.StatusCode.DEADLINE_EXCEEDED)
    rig.look_for(HUNG_GRACE_S)
    assert rig.exits == []
    rig.look_for(0.5)
    assert rig.exits == [EXIT_STUCK]
    [record] = [record for record in caplog.records if record.levelname == "CRITICAL"]
    assert "step_id=9" in record.getMessage() and "step 9 hangs" in record.getMessage()


@pytest.mark.parametrize("ends", ["cut", "closed"])
def test_a_step_that_outlasts_its_session_has_the_time_of_the_longest_step(ends: str) -> None:
    rig = Rig()
    rig.work.steps[9] = rig.clock()
    if ends == "cut":
        rig.stream.ended = Ended("UNAVAILABLE: cut", grpc.StatusCode.UNAVAILABLE)
    else:
        rig.watch.close()
    rig.look_for(30.0)
    rig.clock.advance(300.0)  # this process was stopped
    rig.look_for(30.0)
    assert rig.exits == []
    rig.look_for(1.0)
    assert rig.exits[:1] == [EXIT_STUCK]


def test_no_heartbeat_is_sent_once_the_session_is_over() -> None:
    rig = Rig()
    rig.stream.ended = Ended("cut")
    rig.look_for(3.0)
    assert rig.heartbeats() == []


def test_a_session_is_left_for_a_reason_and_idle_is_a_look_without_a_step() -> None:
    rig = Rig()
    rig.look_for(1.0, is_heard=True)
    rig.work.num_steps = 1
    rig.look_for(1.0, is_heard=True)
    rig.work.steps[2] = rig.clock()
    rig.look_for(0.5, is_heard=True)
    assert rig.idle == [False, True, False, True, False] and rig.inbox.empty()
    rig.work.steps.clear()
    rig.reason = "its certificate was replaced"
    rig.look_for(1.0, is_heard=True)
    assert rig.inbox.get_nowait() == Leave("its certificate was replaced") and rig.inbox.empty()
