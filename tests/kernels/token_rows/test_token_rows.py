"""token_rows against its formula, token by token, in torch and in the form that serves here."""

from __future__ import annotations

import pytest
import torch

from kernels.lora import adapter_segments
from kernels.token_rows import replace_embeddings, replace_logits
from kernels.token_rows.cases import CASES, Case, Problem, make
from tests.kernels.tolerances import assert_close

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def embeddings(problem: Problem, y: torch.Tensor, multiplier: float) -> torch.Tensor:
    """The formula."""
    expected = y.clone()
    for token, slot in enumerate(problem.token_slots.tolist()):
        if 0 <= slot < len(problem.rows):
            for at in (problem.ids[slot] == int(problem.token_ids[token])).nonzero().flatten().tolist():
                expected[token] = problem.rows[slot][at] * torch.tensor(multiplier, dtype=y.dtype)
    return expected


def logits(problem: Problem, before: torch.Tensor, x: torch.Tensor, *, has_bias: bool) -> torch.Tensor:
    """The formula."""
    expected = before.clone()
    for row, slot in enumerate(problem.token_slots.tolist()):
        if 0 <= slot < len(problem.rows) and len(problem.ids[slot]):
            product = problem.rows[slot].float() @ x[row].float()
            total = product + problem.biases[slot] if has_bias else product
            expected[row, problem.ids[slot]] = total.to(before.dtype)
    return expected


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_replaced_tokens_have_their_rows_and_all_others_keep_their_bits(case: Case, dtype: torch.dtype) -> None:
    problem = make(case, dtype)
    y = torch.randn(len(case.token_slots), case.width).to(dtype)
    expected = embeddings(problem, y, 3.0)
    replace_embeddings(y, problem.token_ids, problem.token_slots, problem.table, problem.slots, multiplier=3.0)
    assert torch.equal(y, expected)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_replaced_logits_are_products_with_the_rows_and_all_others_keep_their_bits(
    case: Case, dtype: torch.dtype
) -> None:
    problem = make(case, dtype)
    x = torch.randn(len(case.token_slots), case.width).to(dtype)
    before = torch.randn(len(case.token_slots), case.vocab_size + 2).to(dtype)
    expected, actual = logits(problem, before, x, has_bias=case.has_bias), before.clone()
    segments = adapter_segments(problem.token_slots, problem.table.num_slots)
    replace_logits(actual, x, problem.token_slots, segments, problem.table, problem.slots, max_count=max(case.counts))
    assert_close(actual, expected, magnitude=8.0)
    is_kept = torch.ones_like(before, dtype=torch.bool)
    for row, slot in enumerate(case.token_slots):
        if 0 <= slot < len(problem.ids):
            is_kept[row, problem.ids[slot]] = False
    assert torch.equal(actual[is_kept], before[is_kept])


def test_a_row_has_the_same_bits_alone_and_in_a_batch() -> None:
    case = CASES[3]
    problem = make(case)
    x, before = torch.randn(7, case.width), torch.randn(7, case.vocab_size)

    def run(rows: list[int]) -> torch.Tensor:
        slots, out = problem.token_slots[rows], before[rows].clone()
        segments = adapter_segments(slots, problem.table.num_slots)
        replace_logits(out, x[rows], slots, segments, problem.table, problem.slots, max_count=max(case.counts))
        return out

    together = run(list(range(7)))
    for row in range(7):
        assert torch.equal(run([row])[0], together[row])


def test_rows_of_another_type_or_width_are_refused() -> None:
    problem = make(CASES[2])
    with pytest.raises(ValueError, match=r"y is torch\.float64"):
        replace_embeddings(
            torch.zeros(1, 64, dtype=torch.float64), problem.token_ids, problem.token_slots, problem.table, [0]
        )
    segments = adapter_segments(problem.token_slots, problem.table.num_slots)
    with pytest.raises(ValueError, match=r"x is torch\.float32 \[1, 5\]"):
        replace_logits(
            torch.zeros(1, 100), torch.zeros(1, 5), problem.token_slots, segments, problem.table, [0], max_count=1
        )
