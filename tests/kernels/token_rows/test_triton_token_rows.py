"""token_rows' GPU kernels against their definition; in Triton's interpreter where there is no GPU."""

from __future__ import annotations

import pytest
import torch

from kernels.token_rows import reference, triton_kernel
from kernels.token_rows.cases import CASES, Case, make

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
WITH_TOKENS = [case for case in CASES if case.token_slots]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", WITH_TOKENS, ids=lambda case: case.name)
def test_the_kernel_replaces_the_same_embeddings(case: Case, dtype: torch.dtype, device: torch.device) -> None:
    problem = make(case, dtype, device=device)
    before = torch.randn(len(case.token_slots), case.width).to(device, dtype)
    actual, expected = before.clone(), before.clone()
    triton_kernel.replace_embeddings(actual, problem.token_ids, problem.token_slots, problem.table, 3.0)
    reference.replace_embeddings(expected, problem.token_ids, problem.token_slots, problem.table, problem.slots, 3.0)
    assert torch.equal(actual, expected)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("planes", [1, 3])
@pytest.mark.parametrize("case", WITH_TOKENS, ids=lambda case: case.name)
def test_the_kernel_replaces_the_same_logits(case: Case, planes: int, dtype: torch.dtype, device: torch.device) -> None:
    problem = make(case, dtype, device=device)
    num_rows = len(case.token_slots)
    h = torch.randint(-9, 9, (planes, num_rows, max(case.counts))).float().to(device)  # exact sums in any order
    before = torch.randn(num_rows, case.vocab_size + 2).to(device, dtype)
    actual, expected = before.clone(), before.clone()
    triton_kernel.replace_logits(actual, h, problem.token_slots, problem.table)
    reference.replace_logits(expected, h, problem.token_slots, problem.table, problem.slots)
    assert torch.equal(actual, expected)
