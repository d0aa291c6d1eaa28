"""BlockSwaps against a copy of one block after the other."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings, strategies as st

from kernels.swap_blocks import BlockSwaps
from kernels.swap_blocks.cases import CASES, Case, make
from kernels.swap_blocks.reference import runs


def check(case: Case, device: torch.device) -> None:
    """In, and back to where the blocks came from."""
    caches, hosts, pairs = make(case, device)
    swaps, expected = BlockSwaps(caches, hosts), [cache.cpu().float() for cache in caches]
    swaps.swap_in(pairs)
    for want, host, cache in zip(expected, hosts, caches, strict=True):
        for source, destination in case.pairs:
            want[destination] = host[source].float()
        assert torch.equal(cache.float().cpu(), want)
    # A block has one destination on the way back, too.
    back = {source: (there, source) for source, there in case.pairs}
    kept = [host.float().clone() for host in hosts]
    for host in hosts:
        for source in back:
            host[source] = torch.zeros(host.shape[1:]).to(host.dtype)
    swaps.swap_out(torch.tensor(list(back.values())).long().view(-1, 2))
    if device.type == "cuda":
        torch.cuda.synchronize()
    assert all(torch.equal(host.float(), before) for host, before in zip(hosts, kept, strict=True))


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_equals_copies_of_single_blocks(case: Case, device: torch.device) -> None:
    check(case, device)


@settings(max_examples=25, database=None)
@given(pairs=st.lists(st.tuples(st.integers(0, 5), st.integers(0, 8)), unique_by=lambda pair: pair[1]))
def test_random_pairs_equal_copies_of_single_blocks(pairs: list[tuple[int, int]], device: torch.device) -> None:
    check(Case("random", tuple(pairs)), device)


def test_wrong_pairs_are_refused() -> None:
    caches, hosts, _ = make(CASES[0])
    swaps = BlockSwaps(caches, hosts)
    with pytest.raises(ValueError, match="source blocks 6 to 6 of 6"):
        swaps.swap_in(torch.tensor([[6, 0]]))
    with pytest.raises(ValueError, match="destination blocks 6 to 6 of 6"):
        swaps.swap_out(torch.tensor([[8, 6]]))
    with pytest.raises(ValueError, match="one destination"):
        swaps.swap_in(torch.tensor([[0, 1], [1, 1]]))
    with pytest.raises(ValueError, match=r"want int64 \[n, 2\] on the host"):
        swaps.swap_in(torch.tensor([[0.0, 1.0]]))


def test_caches_without_their_like_in_host_memory_are_refused() -> None:
    caches, hosts, _ = make(CASES[0])
    with pytest.raises(ValueError, match="different blocks"):
        BlockSwaps([caches[0].half()], hosts)
    with pytest.raises(ValueError, match="share memory"):
        BlockSwaps([hosts[0][:3]], [hosts[0][3:]])
    with pytest.raises(ValueError, match="as many of both"):
        BlockSwaps(caches, [])
    with pytest.raises(ValueError, match="must be contiguous"):
        BlockSwaps([caches[0].transpose(1, 2)], [hosts[0].transpose(1, 2)])


def test_neighbours_on_both_sides_are_one_copy() -> None:
    assert runs(torch.tensor([[3, 7], [4, 8], [5, 2], [6, 4], [7, 5]])) == [(0, 2), (2, 1), (3, 2)]
