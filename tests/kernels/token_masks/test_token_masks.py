"""forbid_tokens in its forms against a formula of its own."""

from __future__ import annotations

import pytest
import torch

from kernels.token_masks import LOWEST, cpu, forbid_tokens, reference
from kernels.token_masks.cases import CASES, Case, make

DTYPES = [torch.float32, torch.bfloat16]


def expected(logits: torch.Tensor, rows: torch.Tensor, forbidden: torch.Tensor) -> tuple[torch.Tensor, list[bool]]:
    """Bit by bit."""
    lowered = logits.clone()
    for place, row in enumerate(rows.tolist()):
        mask = forbidden[place].tolist()
        for token in range(logits.shape[1]):
            if mask[token // 8] >> token % 8 & 1:
                lowered[row, token] = LOWEST
    return lowered, [bool(logits[row].isfinite().all()) for row in rows.tolist()]


@pytest.mark.parametrize("form", [reference.forbid_tokens, cpu.forbid_tokens, forbid_tokens])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_forbidden_tokens_are_lowered_and_nothing_else(case: Case, dtype: torch.dtype, form: object) -> None:
    logits, rows, forbidden = make(case, dtype)
    lowered, is_finite = expected(logits, rows, forbidden)
    assert callable(form)
    assert form(logits, rows, forbidden).tolist() == is_finite
    torch.testing.assert_close(logits, lowered, rtol=0, atol=0, equal_nan=True)


def test_what_does_not_fit_is_refused() -> None:
    logits, rows, forbidden = make(CASES[2], torch.float32)
    with pytest.raises(ValueError, match=r"^logits is \(3, 1001\) torch.float16"):
        forbid_tokens(logits.half(), rows, forbidden)
    with pytest.raises(ValueError, match=r"^forbidden is \(2, 125\) torch.uint8, want uint8 \[rows, 126\]"):
        forbid_tokens(logits, rows, forbidden[:, :125])
    with pytest.raises(ValueError, match=r"^rows is \(1,\) torch.int64, want int64 \[2\]"):
        forbid_tokens(logits, rows[:1], forbidden)
