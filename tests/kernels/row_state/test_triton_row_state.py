"""row_state's GPU kernels against their definition; in Triton's interpreter where there is no GPU."""

from __future__ import annotations

from dataclasses import fields

import pytest
import torch

from kernels.row_state import reference, triton_kernel
from kernels.row_state.cases import CASES, Case, make


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_the_kernel_begins_a_step_as_the_definition_does(case: Case, device: torch.device) -> None:
    actual_state, rows = make(case, device=device)
    expected_state, _ = make(case, device=device)
    actual = triton_kernel.decode_inputs(actual_state, rows, case.block_size)
    expected = reference.decode_inputs(expected_state, rows, case.block_size)
    for part in fields(expected):
        assert torch.equal(getattr(actual, part.name), getattr(expected, part.name)), part.name
    assert torch.equal(actual_state.num_computed, expected_state.num_computed)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_the_kernel_stores_the_same_tokens(case: Case, device: torch.device) -> None:
    state, rows = make(case, device=device)
    actual, expected = state.last_tokens.clone(), state.last_tokens.clone()
    tokens = torch.arange(len(rows), device=device) + 7
    triton_kernel.store_tokens(actual, rows, tokens)
    reference.store_tokens(expected, rows, tokens)
    assert torch.equal(actual, expected)


@pytest.mark.parametrize("count", [0, 1, 300])
def test_the_kernel_stores_the_same_differences(count: int, device: torch.device) -> None:
    generator = torch.Generator().manual_seed(count)
    places = torch.randperm(1000, generator=generator)[:count]
    differences = torch.cat([places, torch.randint(-9, 1 << 20, (count,), generator=generator)]).int().to(device)
    actual, expected = (torch.arange(1000, dtype=torch.int32, device=device) for _ in range(2))
    triton_kernel.store_differences(actual, differences)
    reference.store_differences(expected, differences)
    assert torch.equal(actual, expected)
