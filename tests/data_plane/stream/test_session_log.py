"""What a worker logs of its sessions: every reason, and none of them every second."""

from __future__ import annotations

import logging

import grpc
import pytest

from data_plane.stream.plan_stream import Ended
from data_plane.stream.session_log import AWAY_S, REPEAT_S, SessionLog
from tests.fakes.fleet_rig import FakeClock

UNAVAILABLE = grpc.StatusCode.UNAVAILABLE
GONE = Ended("UNAVAILABLE: the control plane is shutting down", UNAVAILABLE)
REFUSED = Ended("Connection refused", UNAVAILABLE, is_unreachable=True)
TAKEN = Ended("UNAVAILABLE: another worker is attached as w0", UNAVAILABLE)
BROKEN = Ended("fault in step 3: PlanRefused: no such row")


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def log(clock: FakeClock, caplog: pytest.LogCaptureFixture) -> SessionLog:
    caplog.set_level(logging.INFO)
    return SessionLog("w0", "host:50052", clock)


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]


def test_worker_that_finds_no_control_plane_says_so_at_once_and_then_every_minute(
    log: SessionLog, clock: FakeClock, caplog: pytest.LogCaptureFixture
) -> None:
    for _ in range(int(REPEAT_S)):
        log.not_attached(REFUSED)
        clock.advance(1.0)
    logged = "no control plane at host:50052 worker_id=w0: Connection refused; trying again every second"
    assert warnings(caplog) == [logged]
    log.not_attached(REFUSED)
    assert warnings(caplog) == [logged, logged]


def test_end_of_the_control_plane_is_no_warning_until_it_stays_away(
    log: SessionLog, clock: FakeClock, caplog: pytest.LogCaptureFixture
) -> None:
    log.attached(1)
    log.session_ended(GONE)
    for _ in range(int(AWAY_S)):
        log.not_attached(REFUSED)
        clock.advance(1.0)
    assert warnings(caplog) == []
    assert "session ended worker_id=w0: UNAVAILABLE: the control plane is shutting down" in caplog.messages
    log.not_attached(REFUSED)
    assert len(warnings(caplog)) == 1


def test_any_other_end_and_every_other_reason_is_a_warning_at_once(
    log: SessionLog, caplog: pytest.LogCaptureFixture
) -> None:
    log.attached(1)
    log.session_ended(BROKEN)
    log.session_ended(GONE)
    for _ in range(3):
        log.not_attached(TAKEN)
    assert warnings(caplog) == [
        "session ended worker_id=w0: fault in step 3: PlanRefused: no such row",
        "not attached worker_id=w0: UNAVAILABLE: another worker is attached as w0; trying again every second",
    ]


def test_return_is_logged_for_people_who_read_of_the_absence(log: SessionLog, caplog: pytest.LogCaptureFixture) -> None:
    log.attached(1)
    log.not_attached(REFUSED)
    log.attached(2)
    assert [getattr(record, "shown", None) for record in caplog.records if "attached worker_id" in record.msg] == [
        None,
        "attached to host:50052",
    ]
