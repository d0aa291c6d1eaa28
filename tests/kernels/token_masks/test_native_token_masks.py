"""forbid_tokens in native code against its definition."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings, strategies as st

from kernels.token_masks import native, reference
from kernels.token_masks.cases import CASES, Case, make
from tests.kernels.threads import in_threads

DTYPES = [torch.float32, torch.bfloat16]


def check(case: Case, dtype: torch.dtype, seed: int = 0) -> None:
    logits, rows, forbidden = make(case, dtype, seed=seed)
    lowered = logits.clone()
    is_finite = reference.forbid_tokens(lowered, rows, forbidden)
    assert native.can_serve(logits, forbidden)
    assert torch.equal(native.forbid_tokens(logits, rows, forbidden), is_finite)
    torch.testing.assert_close(logits, lowered, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_the_native_op_equals_the_reference(case: Case, dtype: torch.dtype) -> None:
    in_threads(lambda: check(case, dtype))


@settings(max_examples=60)
@given(st.integers(1, 40_000), st.floats(0, 1), st.booleans(), st.sampled_from(DTYPES))
def test_random_sizes_equal_the_reference(vocab_size: int, share: float, is_strided: bool, dtype: torch.dtype) -> None:
    check(Case("random", 5, (0, 1, 4), vocab_size, share, is_strided, vocab_size % 3), dtype, vocab_size)
