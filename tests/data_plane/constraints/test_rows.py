"""Rows whose masks are late: they wait, the others do not, and every mask is that of the row's own next token."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch

from data_plane.constraints.lanes import Lanes
from data_plane.constraints.masks import Masks, forbid
from data_plane.constraints.rows import ConstraintRows
from data_plane.plan import Vocabulary
from tests.data_plane.constraints.lanes import DrawnLanes
from tests.data_plane.constraints.test_masks import NUM_TOKENS, row_of, vocabulary

__all__ = ["vocabulary"]  # a fixture
B, Z = ord("b") - ord("!") + 2, ord("z") - ord("!") + 2  # tokens of make_tokenizer


class HeldLanes(Lanes):
    """Tasks wait until the test runs them; those of slow grammars apart."""

    def __init__(self) -> None:
        super().__init__(1)
        self.quick: list[Callable[[], None]] = []
        self.slow: list[Callable[[], None]] = []
        self.time_s = 0.0
        self.task_s = 0.0  # what each look at the time adds
        self.cpu: float | None = None  # CPU time at each look; None: the time

    def run_quick(self, task: Callable[[], None]) -> None:
        self.quick.append(task)

    def run_slow(self, task: Callable[[], None]) -> None:
        self.slow.append(task)

    def now_s(self) -> float:
        self.time_s += self.task_s
        return self.time_s

    def cpu_s(self) -> float:
        return self.now_s() if self.cpu is None else self.cpu

    def wait(self, condition: Callable[[], bool], timeout_s: float) -> bool:
        return condition()


def collected(rows: ConstraintRows, numbers: list[int]) -> Masks:
    masks = rows.collect(np.array(numbers, dtype=np.int64), is_alone=False)
    assert masks is not None
    return masks


def begun(lanes: HeldLanes, vocabulary: Vocabulary, texts: dict[int, str]) -> ConstraintRows:
    """Rows that each allow one text."""
    rows = ConstraintRows(NUM_TOKENS, lanes=lanes)
    for row, text in texts.items():
        rows.add(row_of([text], vocabulary, row))
    lanes.read(lambda: None).result()  # behind the grammars
    return rows


def test_a_row_waits_until_its_mask_is_ready(vocabulary: Vocabulary) -> None:
    lanes = HeldLanes()
    rows = begun(lanes, vocabulary, {3: "b", 4: "z"})
    masks = collected(rows, [2, 3, 4, 9])
    assert masks.waiting == [1, 2] and masks.indices.tolist() == []
    lanes.quick.pop()()
    masks = collected(rows, [2, 3, 4, 9])
    assert masks.waiting == [] and masks.indices.tolist() == [1, 2]
    logits = torch.zeros(4, NUM_TOKENS)
    forbid(logits, masks)
    allowed = [torch.nonzero(row == 0).flatten().tolist() for row in logits]
    assert allowed == [list(range(NUM_TOKENS)), [B], [Z], list(range(NUM_TOKENS))]


def test_indices_are_those_among_the_rows_that_do_not_wait(vocabulary: Vocabulary) -> None:
    lanes = HeldLanes()
    rows = begun(lanes, vocabulary, {0: "bb", 1: "zz"})
    lanes.quick.pop()()
    masks = collected(rows, [0, 1])
    rows.advance(masks, np.arange(2), np.array([B, Z], dtype=np.int32))
    rows.free(np.array([0], dtype=np.int32))
    rows.add(row_of(["z"], vocabulary, 5))
    lanes.read(lambda: None).result()
    lanes.quick[0]()  # follows all that are queued
    rows.add(row_of(["b"], vocabulary, 0))
    masks = collected(rows, [0, 1, 5])
    assert masks.waiting == [0] and masks.indices.tolist() == [0, 1]
    logits = torch.zeros(2, NUM_TOKENS)
    forbid(logits, masks)
    assert [torch.nonzero(row == 0).flatten().tolist() for row in logits] == [[Z], [Z]]


def test_a_grammar_that_was_slow_once_leaves_the_threads_of_quick_ones(vocabulary: Vocabulary) -> None:
    lanes = HeldLanes()
    rows = begun(lanes, vocabulary, {0: "bb"})
    lanes.task_s = 1.0
    lanes.quick.pop()()
    lanes.task_s = 0.0
    rows.advance(collected(rows, [0]), np.zeros(1, dtype=np.int64), np.array([B], dtype=np.int32))
    assert len(lanes.slow) == 1 and not lanes.quick
    rows.add(row_of(["zz"], vocabulary, 1))
    rows.add(row_of(["bb"], vocabulary, 2))
    lanes.read(lambda: None).result()
    assert len(lanes.slow) == 2
    lanes.quick.pop()()
    assert collected(rows, [0, 1, 2]).waiting == [0, 2]
    lanes.slow.pop()()
    assert collected(rows, [0, 1, 2]).waiting == [0]


def test_a_grammar_whose_thread_had_to_wait_for_a_core_is_not_slow(vocabulary: Vocabulary) -> None:
    """6 ms on the clock for a mask that took next to no CPU time, as on a machine whose cores are all busy."""
    lanes = HeldLanes()
    rows = begun(lanes, vocabulary, {0: "bb"})
    lanes.task_s, lanes.cpu = 0.006, 0.0
    lanes.quick.pop()()
    rows.advance(collected(rows, [0]), np.zeros(1, dtype=np.int64), np.array([B], dtype=np.int32))
    assert len(lanes.quick) == 1 and not lanes.slow
    lanes.quick.pop()()
    assert not rows.has_slow(np.zeros(1, dtype=np.int64))


@pytest.mark.parametrize("seed", range(3))
def test_late_masks_are_those_that_would_have_been_in_time(vocabulary: Vocabulary, seed: int) -> None:
    rows = ConstraintRows(NUM_TOKENS, lanes=DrawnLanes(seed, 0.3, is_slow=seed == 2))
    texts = {0: "bzbzbz", 1: "zzbb", 2: "b"}
    for row, text in texts.items():
        rows.add(row_of([text], vocabulary, row))
    written = dict.fromkeys(texts, "")
    while live := [row for row in texts if written[row] != texts[row]]:
        masks = rows.collect(np.array(live), is_alone=True)
        assert masks is not None and not masks.failed
        sampled = np.delete(np.array(live), masks.waiting)
        logits = torch.zeros(len(sampled), NUM_TOKENS)
        forbid(logits, masks)
        tokens = logits.argmax(-1).numpy().astype(np.int32)
        for row, token in zip(sampled.tolist(), tokens.tolist(), strict=True):
            written[row] += {B: "b", Z: "z"}[token]
        rows.advance(masks, sampled, tokens)
    assert written == texts
