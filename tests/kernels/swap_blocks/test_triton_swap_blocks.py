"""The kernel of swap_blocks against its definition, and how often it is launched."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from kernels.swap_blocks import reference
from kernels.swap_blocks.cases import CASES, Case, make
from kernels.swap_blocks.triton_kernel import MAX_PROGRAMS, Moves
from tests.kernels.replaced_launches import replace_launches


@pytest.mark.parametrize("case", [case for case in CASES if case.pairs], ids=lambda case: case.name)
@pytest.mark.parametrize("is_out", [False, True], ids=["in", "out"])
def test_equals_the_reference(case: Case, device: torch.device, *, is_out: bool) -> None:
    ours, theirs = make(case, device), make(case)
    pairs = torch.tensor(sorted(dict(case.pairs).items()))
    pairs = pairs.flip(1) if is_out else pairs
    Moves(*ours[:2]).move(pairs, is_out=is_out)
    caches, hosts, _ = theirs
    if is_out:
        reference.swap_blocks(caches, hosts, pairs)
    else:
        reference.swap_blocks(hosts, caches, pairs)
    if device.type == "cuda":
        torch.cuda.synchronize()
    for side, expected in zip(ours[:2], (caches, hosts), strict=True):
        assert all(torch.equal(a.float().cpu(), b.float()) for a, b in zip(side, expected, strict=True))


def test_scattered_blocks_of_all_layers_are_one_launch_of_few_programs(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """64 blocks that lie apart, of 32 layers' keys and values: 4,096 copies if each block were one."""
    grids: list[tuple[int, ...]] = []

    def launcher(_kernel: Any, grid: Sequence[int]) -> Callable[..., None]:
        return lambda *_positional, **_named: grids.append(tuple(grid))

    replace_launches(monkeypatch, launcher)
    case = Case("scattered", (), num_host_blocks=64, num_blocks=128, block_shapes=((16, 2, 8),) * 64)
    caches, hosts, _ = make(case, device)
    pairs = torch.stack([torch.randperm(128)[:64], torch.randperm(64)], dim=1)
    Moves(caches, hosts).move(pairs, is_out=True)
    assert grids == [(MAX_PROGRAMS,)]


def test_blocks_past_2_to_the_31_words_are_moved(device: torch.device) -> None:
    """Blocks of an odd number of bytes are moved byte by byte. Of 2 GiB the pages of two are ever touched."""
    last = (1 << 31) // 257 + 2
    cache = torch.empty(last + 1, 257, dtype=torch.uint8, device=device)
    cache[last] = 5
    host = torch.zeros(3, 257, dtype=torch.uint8)
    host[0] = 6
    host = host.pin_memory() if device.type == "cuda" else host
    moves = Moves([cache], [host])
    moves.move(torch.tensor([[last, 2]]), is_out=True)
    moves.move(torch.tensor([[0, last - 1]]), is_out=False)
    if device.type == "cuda":
        torch.cuda.synchronize()
    assert host.unique(dim=1)[:, 0].tolist() == [6, 0, 5]
    assert [cache[block].unique().tolist() for block in (last - 1, last)] == [[6], [5]]
