"""Whether drafts pay, by the times of passes and the shares of rows: no clock, every time is given."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from data_plane.engine.speculative.pass_costs import PassCosts


def measured(time_of: Callable[[int], float], *, has_adapters: bool = False) -> PassCosts:
    """Costs that know passes of 1 to 256 tokens."""
    costs = PassCosts()
    for num_tokens in (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256):
        for _ in range(2):
            for is_verifying in (False, True):
                time_s = time_of(num_tokens)
                costs.observe(num_tokens, has_adapters=has_adapters, time_s=time_s, is_verifying=is_verifying)
    return costs


def gains(costs: PassCosts, num_rows: int, share: float, *, num_drafting: int | None = None) -> bool:
    """Whether drafts of 3 tokens pay at the begin of a plan of 4 steps."""
    counts = np.where(np.arange(num_rows) < (num_rows if num_drafting is None else num_drafting), 3, 0)
    most, shares = np.full(num_rows, 3), np.full(num_rows, share)
    return costs.gains(counts, most, shares, has_adapters=False)


@pytest.mark.parametrize(
    ("num_rows", "share", "num_drafting", "expected"),
    [
        (1, 0.9, 1, True),
        (1, 0.3, 1, False),
        (8, 1.0, 8, True),
        (8, 0.5, 8, False),
        (8, 1.0, 7, False),  # one row without drafts needs every pass
        (8, 1.0, 0, False),
        (64, 1.0, 64, False),  # a pass of 256 tokens takes longer than 4 of 64
    ],
)
def test_drafts_pay_if_the_plan_gets_shorter(num_rows: int, share: float, num_drafting: int, expected: bool) -> None:
    costs = measured(lambda num_tokens: 10.0 + 0.2 * num_tokens + 0.001 * num_tokens**2)
    assert gains(costs, num_rows, share, num_drafting=num_drafting) is expected


def test_a_perfect_plan_decides_whether_rows_look_for_drafts() -> None:
    costs = measured(lambda num_tokens: 10.0 + 0.001 * num_tokens**2)
    assert costs.can_gain(8, 4, has_adapters=False)
    assert not costs.can_gain(64, 4, has_adapters=False)
    assert not costs.can_gain(8, 1, has_adapters=False)


@pytest.mark.parametrize(("of_a_token", "expected"), [(0.0, False), (0.005, False), (1.0, True)])
def test_a_row_without_drafts_leaves_a_gain_where_it_is_cheap_alone(of_a_token: float, expected: bool) -> None:
    """Times that hardly grow with the rows: no. A pass of one row that takes an eighth of one of eight: yes."""
    costs = measured(lambda num_tokens: 1.0 - of_a_token + of_a_token * num_tokens)
    assert costs.can_gain_beside(8, 4, has_adapters=False) is expected
    assert not costs.can_gain_beside(1, 4, has_adapters=False)
    assert not PassCosts().can_gain_beside(8, 4, has_adapters=False), "nothing is known"


def test_a_time_is_believed_with_its_second_pass_and_outliers_count_little() -> None:
    costs = PassCosts()
    costs.observe(8, has_adapters=False, time_s=9.0)
    assert costs.time_s(8, has_adapters=False) is None
    costs.observe(8, has_adapters=False, time_s=1.0)
    assert costs.time_s(8, has_adapters=False) == 1.0
    costs.observe(7, has_adapters=False, time_s=1000.0)  # the same bucket as 8
    assert costs.time_s(8, has_adapters=False) == pytest.approx(1.25)
    assert costs.time_s(8, has_adapters=True) is None


def test_what_is_unknown_is_measured() -> None:
    """First a pass without drafts, then one with drafts: both are known then."""
    costs = PassCosts()
    assert not costs.can_gain(1, 4, has_adapters=False) and not gains(costs, 1, 1.0)
    for _ in range(2):
        costs.observe(1, has_adapters=False, time_s=1.0)
    assert costs.can_gain(1, 4, has_adapters=False) and gains(costs, 1, 1.0)
    for _ in range(2):
        costs.observe(4, has_adapters=False, time_s=5.0, is_verifying=True)
    assert not costs.can_gain(1, 4, has_adapters=False) and not gains(costs, 1, 1.0)


def test_a_time_that_is_old_is_measured_again() -> None:
    costs = measured(lambda num_tokens: float(num_tokens) ** 2)
    assert not gains(costs, 1, 1.0)
    for _ in range(600):
        costs.observe(1, has_adapters=False, time_s=1.0)
    assert costs.time_s(4, has_adapters=False, is_verifying=True) is None
    assert gains(costs, 1, 1.0)


def test_a_pass_without_drafts_says_nothing_of_one_that_verifies_some() -> None:
    """Where a graph replays the one and the host builds the other, they differ by a factor."""
    costs = PassCosts()
    for _ in range(2):
        costs.observe(1, has_adapters=False, time_s=5.0)
        costs.observe(4, has_adapters=False, time_s=5.1)  # four rows
        costs.observe(4, has_adapters=False, time_s=31.0, is_verifying=True)  # one row with three drafts
    assert not costs.can_gain(1, 4, has_adapters=False)
    assert costs.time_s(4, has_adapters=False) == 5.1
