"""Steps wait for late masks for a bounded share of the time, whatever grammars come."""

from __future__ import annotations

import numpy as np
import pytest

from data_plane.constraints.patience import PATIENCE_S, PATIENCE_SHARE, Allowance
from data_plane.constraints.rows import ConstraintRows
from data_plane.plan import Vocabulary
from tests.data_plane.constraints.test_masks import NUM_TOKENS, row_of, vocabulary
from tests.data_plane.constraints.test_rows import B, HeldLanes, begun, collected, run_all

__all__ = ["vocabulary"]  # a fixture
STEP_S = 0.02


class WaitingLanes(HeldLanes):
    """No mask is ever ready: each wait takes all the time that it may."""

    def __init__(self) -> None:
        self.waited_s = 0.0
        self.time_s = 0.0
        super().__init__()

    def now_s(self) -> float:
        return self.time_s

    def wait(self, condition: object, timeout_s: float) -> bool:
        self.waited_s += timeout_s
        self.time_s += timeout_s
        return False


def test_patience_comes_back_with_the_time_up_to_its_bound() -> None:
    patience = Allowance(PATIENCE_S, PATIENCE_SHARE, 0.0)
    assert patience.left_s(0.0) == PATIENCE_S
    patience.spend(PATIENCE_S)
    assert patience.left_s(0.0) == 0.0
    assert patience.left_s(0.1) == pytest.approx(0.1 * PATIENCE_SHARE)
    assert patience.left_s(100.0) == PATIENCE_S
    patience.spend(2 * PATIENCE_S)
    assert patience.left_s(100.1) == 0.0


def test_masks_that_are_late_each_time_hold_steps_up_for_a_share_of_the_time(vocabulary: Vocabulary) -> None:
    lanes = WaitingLanes()
    rows = begun(lanes, vocabulary, {1: "bb"})
    run_all(lanes.new)
    rows.advance(collected(rows, [1]), np.array([1]), np.array([B], dtype=np.int32))
    for _ in range(500):
        assert collected(rows, [0, 1]).waiting == [1]
        lanes.time_s += STEP_S
    assert PATIENCE_S < lanes.waited_s <= PATIENCE_S + PATIENCE_SHARE * lanes.time_s


def test_no_step_waits_for_grammars_that_nothing_is_known_of(vocabulary: Vocabulary) -> None:
    """A client can send grammars that turn out to be slow one after the other, each changed a little."""
    lanes = WaitingLanes()
    rows = begun(lanes, vocabulary, {1: "bb"})
    assert collected(rows, [0, 1]).waiting == [1]
    assert lanes.waited_s == 0.0


def test_a_step_of_constrained_rows_alone_waits_as_long_as_ever(vocabulary: Vocabulary) -> None:
    lanes = WaitingLanes()
    rows = ConstraintRows(NUM_TOKENS, lanes=lanes)
    rows.add(row_of(["b"], vocabulary, 1))
    for _ in range(3):
        before_s = lanes.waited_s
        rows.collect(np.array([1], dtype=np.int64), is_alone=True)
        assert lanes.waited_s - before_s > PATIENCE_S
