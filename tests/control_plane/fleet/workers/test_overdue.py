"""When a step or a load counts as hanging, by a clock that the test moves."""

from __future__ import annotations

import pytest

from contract.v1 import plan_pb2
from control_plane.fleet.settings import FleetSettings
from control_plane.fleet.workers.overdue import (
    LOAD_BYTES_PER_S,
    MIN_STEPS,
    NEVER_RECEIVED_S,
    NUM_STEPS,
    SLOWDOWN,
    WorkWatch,
)

SETTINGS = FleetSettings(step_timeout_s=10.0, first_step_timeout_s=100.0, load_timeout_s=30.0)


def at_work(*loads: tuple[int, int, int], step_id: int = 1) -> plan_pb2.Heartbeat:
    """A worker that computes a step, with these loads (slot, generation, age in ms) under way."""
    heartbeat = plan_pb2.Heartbeat(step_id=step_id)
    for slot, generation, age_ms in loads:
        heartbeat.loads.add(slot=slot, generation=generation, age_ms=age_ms)
    return heartbeat


class Watched:
    """A watch over a worker that took the same time for every step so far."""

    def __init__(self, num_steps: int, step_s: float = 0.01, num_tokens: int = 8) -> None:
        self.watch = WorkWatch(SETTINGS)
        self.now_s = 500.0
        for _ in range(num_steps):
            self.finish(step_s, num_tokens)

    def finish(self, step_s: float, num_tokens: int) -> None:
        """A step is sent and answered."""
        self.send(num_tokens)
        self.now_s += step_s
        self.watch.step_finished(round(step_s * 1e6), self.now_s)

    def send(self, num_tokens: int, num_steps: int = 1) -> None:
        self.watch.plan_sent(num_steps, num_tokens, 4, self.now_s)

    def limit_s(self) -> float:
        """After how long the step that is under way is found to hang."""
        for tenths in range(100_000):
            if self.watch.overdue(self.now_s + tenths / 10) is not None:
                return tenths / 10
        raise AssertionError("never")


def test_a_step_has_twenty_times_the_time_of_the_latest_ones_or_the_least_limit() -> None:
    for step_s, limit_s in ((0.01, 10.0), (0.5, 10.0), (2.0, SLOWDOWN * 2.0)):
        watched = Watched(MIN_STEPS, step_s)
        watched.send(8)
        assert watched.limit_s() == limit_s


def test_the_limit_grows_with_the_tokens_of_the_step() -> None:
    watched = Watched(MIN_STEPS, 0.05, num_tokens=1)  # decodes
    watched.send(512)
    assert watched.limit_s() == pytest.approx(SLOWDOWN * 0.05 * 512)
    watched = Watched(MIN_STEPS, 4.0, num_tokens=512)  # prefills: a step of one token is no slower
    watched.send(1)
    assert watched.limit_s() == pytest.approx(SLOWDOWN * 4.0)


def test_one_slow_step_raises_the_limit_until_enough_others_were_answered() -> None:
    watched = Watched(MIN_STEPS)
    watched.finish(5.0, 8)
    watched.send(8)
    assert watched.limit_s() == SLOWDOWN * 5.0
    watched.watch.step_finished(10_000, watched.now_s)
    for _ in range(NUM_STEPS - 1):
        watched.finish(0.01, 8)
    watched.send(8)
    assert watched.limit_s() == 10.0


@pytest.mark.parametrize("num_steps", [0, MIN_STEPS - 1])
def test_the_first_steps_have_the_time_to_compile(num_steps: int) -> None:
    watched = Watched(num_steps)
    watched.send(8)
    assert watched.limit_s() == 100.0


def test_a_step_is_timed_from_the_end_of_the_one_before() -> None:
    watched = Watched(MIN_STEPS)
    watched.send(8)
    watched.send(8)
    watched.now_s += 9.0
    watched.watch.step_finished(10_000, watched.now_s)
    assert watched.limit_s() == 10.0


def test_every_step_of_a_plan_is_timed_by_itself() -> None:
    watched = Watched(MIN_STEPS, 1.0, num_tokens=4)
    watched.send(8, num_steps=3)
    assert watched.limit_s() == SLOWDOWN * 1.0 * 8 / 4
    for _ in range(2):
        watched.now_s += 1.0
        watched.watch.step_finished(1_000_000, watched.now_s)
        assert watched.limit_s() == SLOWDOWN * 1.0
    watched.watch.step_finished(1_000_000, watched.now_s)
    assert watched.watch.overdue(watched.now_s + 1e6) is None, "nothing is under way"


def test_the_finding_names_step_time_and_limit() -> None:
    watched = Watched(MIN_STEPS)
    watched.send(300)
    overdue = watched.watch.overdue(watched.now_s + 12.0)
    assert overdue is not None and overdue.digest is None
    assert overdue.reason == "step 9 of 300 tokens hangs: no result for 12.0 s, the limit is 10.0 s"


def test_a_plan_that_never_arrived_is_distinguished_from_one_that_is_computed() -> None:
    idle, queued = plan_pb2.Heartbeat(num_steps=MIN_STEPS), plan_pb2.Heartbeat(num_plans_waiting=1)
    for heartbeats, is_lost in (([idle], True), ([at_work()], False), ([queued], False), ([idle, queued], False)):
        watched = Watched(1)
        watched.watch.heartbeat(idle, watched.now_s)  # nothing is due yet
        watched.send(8)
        for number in range(round(2 * NEVER_RECEIVED_S) + 1):
            assert watched.watch.overdue(watched.now_s) is None
            watched.now_s += 0.5
            watched.watch.heartbeat(heartbeats[number % len(heartbeats)], watched.now_s)
        overdue = watched.watch.overdue(watched.now_s)
        assert (overdue is not None) == is_lost
        assert overdue is None or overdue.reason.endswith("and the worker has nothing to do")


def test_a_load_has_a_time_and_that_of_its_bytes_from_when_it_is_under_way() -> None:
    watch = WorkWatch(SETTINGS)
    watch.load_sent(2, 1, "ab" * 32, 10 * LOAD_BYTES_PER_S)
    watch.load_sent(3, 1, "cd" * 32, 0)
    watch.heartbeat(at_work((2, 1, 500)), 100.0)  # the other one waits for a thread
    assert watch.overdue(139.4) is None
    overdue = watch.overdue(139.5)
    assert overdue is not None and overdue.digest == "ab" * 32
    assert overdue.reason == f"the load of {'ab' * 32} hangs for 40.0 s, the limit is 40.0 s"
    watch.load_finished(2, 1)
    watch.heartbeat(at_work((3, 1, 0)), 140.0)
    assert watch.overdue(169.9) is None
    overdue = watch.overdue(170.0)
    assert overdue is not None and overdue.digest == "cd" * 32


def test_a_load_that_nobody_began_is_overdue() -> None:
    watch = WorkWatch(SETTINGS)
    watch.heartbeat(at_work(), 90.0)
    watch.load_sent(2, 1, "ab" * 32, 0)
    for half_s in range(round(2 * NEVER_RECEIVED_S) + 1):
        now_s = 100.0 + half_s / 2
        watch.heartbeat(at_work(), now_s)
        assert (watch.overdue(now_s) is not None) == (half_s == 2 * NEVER_RECEIVED_S)
    watch.load_finished(2, 1)
    assert watch.overdue(1000.0) is None


def test_loads_that_nobody_knows_are_passed_over() -> None:
    watch = WorkWatch(SETTINGS)
    watch.load_finished(1, 1)
    watch.heartbeat(at_work((7, 7, 10**15)), 100.0)
    assert watch.overdue(1e6) is None
