"""swap_blocks against its definition."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.swap_blocks import reference, runs, swap_blocks
from kernels.swap_blocks.cases import CASES, Case, make


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_equals_the_reference(case: Case, device: torch.device) -> None:
    """There, and back to where the blocks came from."""
    host, ours, pairs = make(case, device)
    theirs = ours.cpu().clone()
    swap_blocks(host, ours, pairs)
    reference.swap_blocks(host, theirs, pairs)
    assert torch.equal(ours.float().cpu(), theirs.float())
    back = torch.zeros_like(host, pin_memory=device.type == "cuda")
    expected = torch.zeros_like(host)
    # A block has one destination on the way back, too.
    pairs = torch.tensor(list({source: (there, source) for source, there in case.pairs}.values())).long().view(-1, 2)
    swap_blocks(ours, back, pairs)
    reference.swap_blocks(theirs, expected, pairs)
    if device.type == "cuda":
        torch.cuda.synchronize()
    assert torch.equal(back.float(), expected.float())


@settings(max_examples=25, database=None)
@given(pairs=st.lists(st.tuples(st.integers(0, 5), st.integers(0, 8)), unique_by=lambda pair: pair[1]))
def test_random_pairs_equal_the_reference(pairs: list[tuple[int, int]], device: torch.device) -> None:
    host, ours, index = make(Case("random", tuple(pairs)), device)
    theirs = ours.cpu().clone()
    swap_blocks(host, ours, index)
    reference.swap_blocks(host, theirs, index)
    assert torch.equal(ours.cpu(), theirs)
    assert sum(count for _, count in runs(index)) == len(pairs)


def test_neighbours_on_both_sides_are_one_copy() -> None:
    assert runs(torch.tensor([[3, 7], [4, 8], [5, 2], [6, 4], [7, 5]])) == [(0, 2), (2, 1), (3, 2)]


def test_wrong_arguments_are_refused() -> None:
    source, destination, _ = make(CASES[0])
    with pytest.raises(ValueError, match="source blocks 6 to 6 of 6"):
        swap_blocks(source, destination, torch.tensor([[6, 0]]))
    with pytest.raises(ValueError, match="different blocks"):
        swap_blocks(source, destination.half(), torch.tensor([[0, 0]]))
    with pytest.raises(ValueError, match="one destination"):
        swap_blocks(source, destination, torch.tensor([[0, 1], [1, 1]]))
    with pytest.raises(ValueError, match="share memory"):
        swap_blocks(source[:3], source[3:], torch.tensor([[0, 1]]))
