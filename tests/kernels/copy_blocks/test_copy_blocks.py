"""copy_blocks, by torch and by the GPU kernel, against one block after the other."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings, strategies as st

from kernels.copy_blocks import copy_blocks, triton_kernel
from kernels.copy_blocks.cases import CASES, Case, make


def expected_of(caches: list[torch.Tensor], pairs: torch.Tensor) -> list[torch.Tensor]:
    copies = [cache.clone() for cache in caches]
    for copy, cache in zip(copies, caches, strict=True):
        for source, destination in pairs.tolist():
            copy[destination] = cache[source]
    return copies


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_copies_blocks_of_every_cache(case: Case, device: torch.device) -> None:
    caches, pairs = make(case)
    expected = expected_of(caches, pairs)
    on_device = [cache.to(device) for cache in caches]
    copy_blocks(on_device, pairs)
    for ours, theirs in zip(on_device, expected, strict=True):
        assert torch.equal(ours.cpu(), theirs)


@settings(max_examples=20, database=None)
@given(data=st.data())
def test_random_pairs_are_copied(data: st.DataObject, device: torch.device) -> None:
    """By the public call any pairs, by the GPU kernel those whose sources are not destinations."""
    num_blocks = data.draw(st.integers(1, 7))
    shapes = data.draw(st.lists(st.tuples(*(st.integers(1, 4) for _ in range(3))), min_size=1, max_size=3))
    dtype = data.draw(st.sampled_from((torch.float32, torch.bfloat16, torch.uint8, torch.float8_e4m3fn)))
    caches, _ = make(Case("random", num_blocks, tuple(shapes), 0, dtype))
    blocks = st.integers(0, num_blocks - 1)
    destinations = data.draw(st.lists(blocks, unique=True, max_size=num_blocks))
    sources = [data.draw(blocks) for _ in destinations]
    pairs = torch.tensor([sources, destinations], dtype=torch.int64).T.contiguous()
    on_device = [cache.to(device, copy=True) for cache in caches]
    copy_blocks(on_device, pairs)
    assert all(equal(*both) for both in zip(on_device, expected_of(caches, pairs), strict=True))
    if pairs.numel() and not set(sources) & set(destinations):
        on_device = [cache.to(device, copy=True) for cache in caches]
        triton_kernel.copy_blocks(on_device, pairs)
        assert all(equal(*both) for both in zip(on_device, expected_of(caches, pairs), strict=True))


def equal(ours: torch.Tensor, theirs: torch.Tensor) -> bool:
    return torch.equal(ours.cpu().float(), theirs.float())


def test_sources_are_read_before_destinations_are_written(device: torch.device) -> None:
    """Blocks that change places."""
    caches, _ = make(CASES[1])
    pairs = torch.tensor([[0, 1], [1, 0], [2, 3]])
    expected = expected_of(caches, pairs)
    on_device = [cache.to(device) for cache in caches]
    copy_blocks(on_device, pairs)
    assert torch.equal(on_device[0].cpu(), expected[0])


@pytest.mark.parametrize("case", CASES[1:], ids=lambda case: case.name)
def test_the_gpu_kernel_copies_the_same(case: Case, device: torch.device) -> None:
    caches, pairs = make(case)
    expected = expected_of(caches, pairs)
    on_device = [cache.to(device) for cache in caches]
    triton_kernel.copy_blocks(on_device, pairs)
    for ours, theirs in zip(on_device, expected, strict=True):
        assert torch.equal(ours.cpu(), theirs)


def test_blocks_past_2_to_the_31_words_are_copied(device: torch.device) -> None:
    """Blocks of an odd number of bytes are copied byte by byte. Of 2 GiB the pages of three are ever touched."""
    last = (1 << 31) // 257 + 2
    cache = torch.empty(last + 1, 257, dtype=torch.uint8, device=device)
    cache[last], cache[0], cache[1] = 5, 6, 7
    triton_kernel.copy_blocks([cache], torch.tensor([[last, 0], [1, last - 1]]))
    assert [cache[block].unique().tolist() for block in (0, 1, last - 1, last)] == [[5], [7], [7], [5]]


def test_wrong_pairs_are_refused() -> None:
    caches, _ = make(CASES[1])
    with pytest.raises(ValueError, match="want int64"):
        copy_blocks(caches, torch.zeros(1, 2, dtype=torch.int32))
    with pytest.raises(ValueError, match="blocks 0 to 4 of 4"):
        copy_blocks(caches, torch.tensor([[0, 4]]))
    with pytest.raises(ValueError, match="one destination"):
        copy_blocks(caches, torch.tensor([[0, 2], [1, 2]]))
    with pytest.raises(ValueError, match="want contiguous"):
        copy_blocks([caches[0].transpose(1, 2)], torch.tensor([[0, 1]]))
