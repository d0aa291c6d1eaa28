"""How many steps a plan stands for, from what was measured."""

from __future__ import annotations

import pytest

from control_plane.fleet.workers.round_trip import MIN_STEPS, RoundTrip


def measured(
    round_trip_ms: float, step_ms: float, *, plan_depth: int = 2, turnaround_ms: float = 0.0, num_steps: int = 200
) -> RoundTrip:
    """What a session knows after one ping and many steps."""
    round_trip = RoundTrip(plan_depth)
    for _ in range(num_steps):
        round_trip.step(round(step_ms * 1000), turnaround_ms / 1000)
    assert round_trip.pong(round_trip.ping(10.0), 10.0 + round_trip_ms / 1000) is not None
    return round_trip


@pytest.mark.parametrize(
    ("round_trip_ms", "step_ms", "plan_depth", "max_steps"),
    [
        (0.3, 5.0, 2, 1),  # hidden by the plan depth alone
        (4.9, 5.0, 2, 1),
        (5.5, 5.0, 2, 2),
        (10.5, 5.0, 2, 3),
        (10.5, 5.0, 3, 2),  # two plans are under way while the third travels
        (10.5, 5.0, 4, 1),
        (80.0, 5.0, 2, 4),  # cannot be hidden: as far as it goes
        (80.0, 5.0, 1, 1),  # nothing is to run ahead
        (1.0, 0.0, 2, 4),  # a step too short to measure
    ],
)
def test_a_plan_stands_for_as_many_steps_as_hide_the_round_trip(
    round_trip_ms: float, step_ms: float, plan_depth: int, max_steps: int
) -> None:
    assert measured(round_trip_ms, step_ms, plan_depth=plan_depth).max_steps == max_steps


def test_the_time_from_result_to_plan_counts_as_way() -> None:
    assert measured(4.5, 5.0).max_steps == 1
    assert measured(4.5, 5.0, turnaround_ms=1.0).max_steps == 2


def test_one_slow_pong_and_one_long_step_change_nothing() -> None:
    round_trip = measured(1.0, 5.0)
    for _ in range(4):
        round_trip.pong(round_trip.ping(20.0), 20.001)
    round_trip.step(200_000, 0.0)  # a long prefill
    round_trip.pong(round_trip.ping(21.0), 21.5)
    assert round_trip.max_steps == 1
    assert (round_trip.round_trip_s, round_trip.step_time_s) == pytest.approx((0.001, 0.005))


def test_a_way_that_became_longer_is_noticed_and_so_is_one_that_became_shorter() -> None:
    round_trip = measured(1.0, 5.0)
    for _ in range(8):
        round_trip.pong(round_trip.ping(30.0), 30.012)
    assert round_trip.max_steps == 3
    for _ in range(8):
        round_trip.pong(round_trip.ping(40.0), 40.001)
    assert round_trip.max_steps == 1


def test_nothing_runs_ahead_before_enough_steps_were_seen() -> None:
    assert measured(50.0, 5.0, num_steps=MIN_STEPS - 1).max_steps == 1


def test_a_pong_to_no_open_ping_is_not_taken() -> None:
    round_trip = RoundTrip(2)
    sequence = round_trip.ping(1.0)
    assert round_trip.pong(sequence + 1, 1.1) is None
    assert round_trip.pong(sequence, 1.1) is not None
    assert round_trip.pong(sequence, 1.2) is None


def test_a_plan_stands_for_no_fewer_steps_than_the_setting() -> None:
    round_trip = RoundTrip(2, min_steps=3)
    assert round_trip.max_steps == 3
    for _ in range(MIN_STEPS):
        round_trip.step(1_000_000, 0.0)
    assert round_trip.pong(round_trip.ping(0.0), 0.001) == 0.001
    assert round_trip.steps_to_hide() == 1 and round_trip.max_steps == 3
