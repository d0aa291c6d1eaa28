"""token_rows' GPU kernels against their definition; in Triton's interpreter where there is no GPU."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from kernels.lora.layout import page_values
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


def test_rows_past_2_to_the_31_values_are_read(device: torch.device) -> None:
    """Rows, their ids and biases. Of an arena of 8 GiB only the pages of these adapters are ever touched."""
    problem = make(next(case for case in CASES if case.has_bias), torch.float32, device=device)
    near, num_rows = problem.table, len(problem.token_slots)
    first = (1 << 31) // near.pages[0].numel() + 1
    pages = torch.empty(first + len(near.pages), *near.pages.shape[1:], device=device)
    pages[first:] = near.pages
    far = replace(near, pages=pages, values=page_values(pages), page_ids=near.page_ids + first)
    h = torch.ones(1, num_rows, int(near.count.max()), device=device)
    results = []
    for table in (near, far):
        embeddings = torch.zeros(num_rows, near.width, device=device)
        logits = torch.zeros(num_rows, 100, device=device)
        triton_kernel.replace_embeddings(embeddings, problem.token_ids, problem.token_slots, table, 3.0)
        triton_kernel.replace_logits(logits, h, problem.token_slots, table)
        results.append((embeddings, logits))
    assert all(torch.equal(*pair) and pair[0].any() for pair in zip(*results, strict=True))
