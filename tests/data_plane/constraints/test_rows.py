"""Rows whose masks are late: they wait, the others do not, and every mask is that of the row's own next token."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch

from contract.sampling import GRAMMAR_LIMITS
from data_plane.constraints.lanes import Lanes
from data_plane.constraints.masks import Masks, forbid
from data_plane.constraints.matchers import Matcher, Matchers
from data_plane.constraints.rows import ConstraintRows
from data_plane.plan import RowConstraint, Vocabulary
from tests.data_plane.constraints.lanes import DrawnLanes
from tests.data_plane.constraints.test_masks import NUM_TOKENS, row_of, vocabulary
from tests.data_plane.constraints.test_matchers import constraint_of, ids_of

__all__ = ["vocabulary"]  # a fixture
LONG = 300
# Each character is a state of the lexer, and each alternative has states of its own.
ROW_LENGTHS = f"[a-d]{{{LONG}}}|[m-p]{{{LONG}}}|[w-z]{{{LONG}}}"
B, Z = ord("b") - ord("!") + 2, ord("z") - ord("!") + 2  # tokens of make_tokenizer


class HeldLanes(Lanes):
    """Tasks wait until the test runs them; those of slow grammars apart."""

    def __init__(self) -> None:
        super().__init__(1)
        self.new: list[Callable[[], None]] = []
        self.quick: list[Callable[[], None]] = []
        self.slow: list[Callable[[], None]] = []
        self.task_s = 0.0  # what each part of a task takes
        self.num_vain_waits = 0  # of steps

    def run_new(self, task: Callable[[], None]) -> None:
        self.new.append(task)

    def run_quick(self, task: Callable[[], None]) -> None:
        self.quick.append(task)

    def run_slow(self, task: Callable[[], None]) -> None:
        self.slow.append(task)

    def cpu_s(self) -> float:
        return self.task_s

    def wait(self, condition: Callable[[], bool], timeout_s: float) -> bool:
        is_met = condition()
        self.num_vain_waits += not is_met
        return is_met

    def run_all(self) -> None:
        for tasks in (self.new, self.quick):
            run_all(tasks)

    def read_all(self) -> None:
        """Wait until every row has a matcher, or a task that builds it."""
        self.read(lambda: None).result()


def collected(rows: ConstraintRows, numbers: list[int]) -> Masks:
    masks = rows.collect(np.array(numbers, dtype=np.int64), is_alone=False)
    assert masks is not None
    return masks


def begun(lanes: HeldLanes, vocabulary: Vocabulary, texts: dict[int, str]) -> ConstraintRows:
    """Rows that each allow one text."""
    rows = ConstraintRows(NUM_TOKENS, lanes=lanes)
    for row, text in texts.items():
        rows.add(row_of([text], vocabulary, row))
    lanes.read_all()
    return rows


def run_all(tasks: list[Callable[[], None]]) -> None:
    while tasks:
        tasks.pop(0)()


def test_a_row_waits_until_its_mask_is_ready(vocabulary: Vocabulary) -> None:
    lanes = HeldLanes()
    rows = begun(lanes, vocabulary, {3: "b", 4: "z"})
    masks = collected(rows, [2, 3, 4, 9])
    assert masks.waiting == [1, 2] and masks.indices.tolist() == []
    run_all(lanes.new)
    masks = collected(rows, [2, 3, 4, 9])
    assert masks.waiting == [] and masks.indices.tolist() == [1, 2]
    logits = torch.zeros(4, NUM_TOKENS)
    forbid(logits, masks)
    allowed = [torch.nonzero(row == 0).flatten().tolist() for row in logits]
    assert allowed == [list(range(NUM_TOKENS)), [B], [Z], list(range(NUM_TOKENS))]


def test_indices_are_those_among_the_rows_that_do_not_wait(vocabulary: Vocabulary) -> None:
    lanes = HeldLanes()
    rows = begun(lanes, vocabulary, {0: "bb", 1: "zz"})
    run_all(lanes.new)
    masks = collected(rows, [0, 1])
    rows.advance(masks, np.arange(2), np.array([B, Z], dtype=np.int32))
    rows.free(np.array([0], dtype=np.int32))
    rows.add(row_of(["z"], vocabulary, 5))
    lanes.read_all()
    run_all(lanes.new)
    run_all(lanes.quick)
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
    run_all(lanes.new)
    lanes.task_s = 0.0
    rows.advance(collected(rows, [0]), np.zeros(1, dtype=np.int64), np.array([B], dtype=np.int32))
    assert len(lanes.slow) == 1 and not lanes.quick
    rows.add(row_of(["zz"], vocabulary, 1))
    rows.add(row_of(["bb"], vocabulary, 2))
    lanes.read_all()
    assert len(lanes.slow) == 2
    run_all(lanes.new)
    assert collected(rows, [0, 1, 2]).waiting == [0, 2]
    lanes.slow.pop()()
    assert collected(rows, [0, 1, 2]).waiting == [0]


def advance(rows: ConstraintRows, masks: Masks, tokens: dict[int, int]) -> None:
    numbers = np.array(list(tokens))
    rows.advance(masks, numbers, np.array(list(tokens.values()), dtype=np.int32))


def long_rows(lanes: HeldLanes, vocabulary: Vocabulary, letters: str) -> tuple[ConstraintRows, list[int]]:
    """Rows of one grammar, each of which takes most states of a lexer, behind all but the last 30 of their tokens.

    Nothing is ready: their last token is what the lexer that they share cannot follow.
    """
    rows, numbers = ConstraintRows(NUM_TOKENS, lanes=lanes), list(range(len(letters)))
    constraint = constraint_of(ROW_LENGTHS, vocabulary)
    for number in numbers:
        rows.add(replace(row_of(["b"], vocabulary, number), constraint=constraint))
    lanes.read_all()
    lanes.run_all()
    lanes.read_all()
    lanes.run_all()
    for _ in range(LONG - 30):
        masks = collected(rows, numbers)
        if masks.waiting:
            break
        advance(rows, masks, {number: ids_of(letters[number])[0] for number in numbers})
        run_all(lanes.quick)
    return rows, numbers


def test_a_row_that_starts_again_is_followed_in_pieces_by_threads_of_slow_grammars(
    vocabulary: Vocabulary, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where that shows the grammar to be quick again."""
    monkeypatch.setitem(GRAMMAR_LIMITS, "max_lexer_states", 500)
    monkeypatch.setattr("data_plane.constraints.rows.FOLLOWED_AT_ONCE", 50)
    monkeypatch.setattr("data_plane.constraints.rows.FORGIVEN_AFTER", 60)
    lanes = HeldLanes()
    rows, numbers = long_rows(lanes, vocabulary, "bz")
    assert collected(rows, numbers).waiting == numbers
    assert not lanes.quick and len(lanes.slow) == 2  # nothing was followed once more by a thread of quick ones
    num_tasks = 0
    while lanes.slow:
        lanes.slow.pop(0)()
        num_tasks += 1
    assert num_tasks > 2 * 3 and not lanes.quick
    masks = collected(rows, numbers)
    assert not masks.waiting and not masks.failed
    logits = torch.zeros(2, NUM_TOKENS)
    forbid(logits, masks)
    allowed = [set(torch.nonzero(row == 0).flatten().tolist()) for row in logits]
    assert allowed[0] >= set(ids_of("abcd")) and allowed[1] >= set(ids_of("wxyz")) and not allowed[0] & allowed[1]


def test_a_row_waits_for_a_lexer_until_another_row_ends(
    vocabulary: Vocabulary, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No row fails by the bound. Those that wait sit out steps, and no step waits for them."""
    monkeypatch.setitem(GRAMMAR_LIMITS, "max_lexer_states", 500)
    monkeypatch.setattr("data_plane.constraints.rows.FORGIVEN_AFTER", 20)
    monkeypatch.setattr("data_plane.constraints.matchers.MAX_OWN_LEXERS", 1)
    lanes = HeldLanes()
    letters = "bzn"
    rows, numbers = long_rows(lanes, vocabulary, letters)
    run_all(lanes.slow)
    # Row 0 had its mask when the lexer broke: it finds out with its next token. Behind a few more the grammar is quick.
    for _ in range(15):
        masks = collected(rows, numbers)
        advance(rows, masks, {number: ids_of(letters[number])[0] for number in numbers if number not in masks.waiting})
        run_all(lanes.quick)
        run_all(lanes.slow)
    lanes.num_vain_waits = 0
    for is_verifying in (False, True, False):
        found = rows.collect(np.array(numbers), is_alone=True, is_verifying=is_verifying)
        assert found is not None and len(found.waiting) == 2 and not found.failed and not lanes.slow
    assert lanes.num_vain_waits == 0
    masks = collected(rows, numbers)
    for num_left in (1, 0):
        [ready] = set(numbers) - {numbers[index] for index in masks.waiting}
        rows.free(np.array([ready], dtype=np.int32))
        numbers.remove(ready)
        masks = collected(rows, numbers)
        run_all(lanes.slow)
        masks = collected(rows, numbers)
        assert len(masks.waiting) == num_left and not masks.failed
    rows.free(np.array(numbers, dtype=np.int32))
    assert rows.collect(np.arange(3), is_alone=False) is None


def test_a_grammar_begins_on_the_threads_of_new_ones_and_goes_on_with_the_quick_ones(vocabulary: Vocabulary) -> None:
    lanes = HeldLanes()
    rows = begun(lanes, vocabulary, {0: "bb"})
    assert len(lanes.new) == 1 and not lanes.quick and not lanes.slow
    run_all(lanes.new)
    rows.advance(collected(rows, [0]), np.zeros(1, dtype=np.int64), np.array([B], dtype=np.int32))
    rows.add(row_of(["bb"], vocabulary, 1))
    lanes.read_all()
    assert len(lanes.quick) == 2 and not lanes.new


def test_rows_of_one_new_grammar_build_it_once(vocabulary: Vocabulary, monkeypatch: pytest.MonkeyPatch) -> None:
    """The row that began to build it ends before; the others do not wait for ever."""
    found: list[object] = []
    find = Matchers.find

    def noted(matchers: Matchers, constraint: RowConstraint) -> Matcher | Callable[[], Matcher]:
        found.append(result := find(matchers, constraint))
        return result

    monkeypatch.setattr(Matchers, "find", noted)
    lanes = HeldLanes()
    rows = begun(lanes, vocabulary, {0: "bb", 1: "bb", 2: "bb"})
    assert len(lanes.new) == 1
    rows.free(np.array([0], dtype=np.int32))
    run_all(lanes.new)
    lanes.read_all()
    assert len(lanes.new) == 1  # row 1 builds it
    run_all(lanes.new)
    lanes.read_all()
    # Row 2 has what row 1 built. It may have looked before row 1 showed that the grammar is quick.
    assert [isinstance(each, Matcher) for each in found] == [False] * 5 + [True]
    run_all(lanes.quick)
    run_all(lanes.new)
    assert collected(rows, [1, 2]).waiting == []


def test_tokens_of_one_grammar_are_followed_together(vocabulary: Vocabulary) -> None:
    """One task for 40 rows is too long, and each row gets the mask of its own place."""
    lanes, numbers = HeldLanes(), np.arange(40)
    rows = begun(lanes, vocabulary, dict.fromkeys(range(40), "bzb"))
    run_all(lanes.new)
    lanes.read_all()
    run_all(lanes.quick)
    for token in (B, Z):
        rows.advance(collected(rows, numbers.tolist()), numbers, np.full(40, token, dtype=np.int32))
        assert len(lanes.quick) == 2
        run_all(lanes.quick)
    masks = collected(rows, numbers.tolist())
    assert masks.indices.tolist() == numbers.tolist() and not masks.failed
    logits = torch.zeros(40, NUM_TOKENS)
    forbid(logits, masks)
    assert torch.equal(torch.nonzero(logits == 0)[:, 1], torch.full((40,), B))


def test_a_grammar_that_fails_takes_one_line_of_the_log(
    vocabulary: Vocabulary, caplog: pytest.LogCaptureFixture
) -> None:
    """llguidance's reason has many lines."""
    lanes, numbers = HeldLanes(), np.arange(1)
    rows = begun(lanes, vocabulary, {0: "bzb"})
    run_all(lanes.new)
    rows.advance(collected(rows, [0]), numbers, np.array([Z], dtype=np.int32))
    run_all(lanes.quick)
    assert collected(rows, [0]).failed == [0]
    [record] = caplog.records
    assert record.getMessage().startswith("constraint failed row=0: ") and "\n" not in record.getMessage()


def test_rows_that_a_slow_task_leaves_to_another_one_go_on(
    vocabulary: Vocabulary, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tokens of all of them were followed before the task took too long."""
    lanes, numbers = HeldLanes(), np.arange(4)
    rows = begun(lanes, vocabulary, dict.fromkeys(range(4), "bzb"))
    run_all(lanes.new)
    lanes.read_all()
    run_all(lanes.quick)
    rows.advance(collected(rows, numbers.tolist()), numbers, np.full(4, B, dtype=np.int32))
    monkeypatch.setattr(lanes, "has_low_priority", lambda: True)
    lanes.quick.pop(0)()
    monkeypatch.setattr(lanes, "has_low_priority", lambda: False)
    run_all(lanes.quick)
    masks = collected(rows, numbers.tolist())
    assert masks.indices.tolist() == numbers.tolist() and not masks.failed and not masks.waiting


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
