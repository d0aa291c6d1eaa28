"""row_state's GPU kernels against their definition; in Triton's interpreter where there is no GPU."""

from __future__ import annotations

from dataclasses import fields

import pytest
import torch

from kernels.row_state import DraftTokens, reference, triton_kernel
from kernels.row_state.cases import CASES, Case, make, no_drafts


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_the_kernel_begins_a_step_as_the_definition_does(case: Case, device: torch.device) -> None:
    actual_state, rows = make(case, device=device)
    expected_state, _ = make(case, device=device)
    actual = triton_kernel.decode_inputs(actual_state, rows, case.block_size, no_drafts(rows))
    expected = reference.decode_inputs(expected_state, rows, case.block_size, no_drafts(rows))
    for part in fields(expected):
        assert torch.equal(getattr(actual, part.name), getattr(expected, part.name)), part.name
    assert torch.equal(actual_state.num_computed, expected_state.num_computed)


def test_the_kernel_begins_a_step_with_drafts_as_the_definition_does(device: torch.device) -> None:
    """Three rows with 2, 0 and 160 drafts, which lie in two programs, and padding."""
    state, _ = make(Case("rows", 5, (), block_size=16, max_blocks=30), device=device)
    state.num_computed.clamp_(max=300)
    before = state.num_computed.clone()
    rows = [3, 3, 3, 0, *[4] * 161, -1]
    ahead = [0, 1, 2, 0, *range(161), 0]
    rows_there, ahead_there, ids = (
        torch.tensor(values, dtype=torch.int32, device=device) for values in (rows, ahead, range(900, 900 + len(rows)))
    )
    drafts = DraftTokens(ahead_there, ids)
    actual = triton_kernel.decode_inputs(state, rows_there, 16, drafts)
    expected = reference.decode_inputs(state, rows_there, 16, drafts)
    for part in fields(expected):
        assert torch.equal(getattr(actual, part.name), getattr(expected, part.name)), part.name
    assert torch.equal(state.num_computed, before)
    assert actual.positions[:4].tolist() == [int(before[3]) + place for place in range(3)] + [int(before[0])]
    assert actual.input_ids[:4].tolist() == [int(state.last_tokens[3]), 901, 902, int(state.last_tokens[0])]


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
