"""swap_blocks against its definition."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.swap_blocks import reference, runs, swap_blocks


def caches() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(6, 4, 2, 3, generator=generator), torch.randn(9, 4, 2, 3, generator=generator)


@pytest.mark.parametrize("pairs", [[], [[5, 0]], [[0, 4], [1, 5], [2, 8], [3, 2], [3, 3]]], ids=str)
def test_equals_the_reference(pairs: list[list[int]], device: torch.device) -> None:
    """There and back."""
    host, other = caches()
    if device.type == "cuda":
        host = host.pin_memory()
    index = torch.tensor(pairs, dtype=torch.int64).view(-1, 2)
    ours, theirs = other.to(device, copy=True), other.clone()
    swap_blocks(host, ours, index)
    reference.swap_blocks(host, theirs, index)
    assert torch.equal(ours.cpu(), theirs)
    back = torch.zeros_like(host, pin_memory=device.type == "cuda")
    expected = torch.zeros_like(back)
    index = index.flip(1)[:4]
    swap_blocks(ours, back, index)
    reference.swap_blocks(theirs, expected, index)
    if device.type == "cuda":
        torch.cuda.synchronize()
    assert torch.equal(back, expected)


@settings(max_examples=25, derandomize=True, deadline=None, database=None)
@given(pairs=st.lists(st.tuples(st.integers(0, 5), st.integers(0, 8)), unique_by=lambda pair: pair[1]))
def test_random_pairs_equal_the_reference(pairs: list[tuple[int, int]], device: torch.device) -> None:
    host, other = caches()
    if device.type == "cuda":
        host = host.pin_memory()
    index = torch.tensor(pairs, dtype=torch.int64).view(-1, 2)
    ours, theirs = other.to(device, copy=True), other.clone()
    swap_blocks(host, ours, index)
    reference.swap_blocks(host, theirs, index)
    assert torch.equal(ours.cpu(), theirs)
    assert sum(count for _, count in runs(index)) == len(pairs)


def test_neighbours_on_both_sides_are_one_copy() -> None:
    assert runs(torch.tensor([[3, 7], [4, 8], [5, 2], [6, 4], [7, 5]])) == [(0, 2), (2, 1), (3, 2)]


def test_wrong_arguments_are_refused() -> None:
    source, destination = caches()
    with pytest.raises(ValueError, match="source blocks 6 to 6 of 6"):
        swap_blocks(source, destination, torch.tensor([[6, 0]]))
    with pytest.raises(ValueError, match="different blocks"):
        swap_blocks(source, destination.half(), torch.tensor([[0, 0]]))
    with pytest.raises(ValueError, match="one destination"):
        swap_blocks(source, destination, torch.tensor([[0, 1], [1, 1]]))
    with pytest.raises(ValueError, match="share memory"):
        swap_blocks(source[:3], source[3:], torch.tensor([[0, 1]]))
