"""Shapes of swap_blocks for its tests, on the CPU and on a GPU."""

from __future__ import annotations

from dataclasses import dataclass

import torch

CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True)
class Case:
    """Caches on a device, as many in host memory, and the blocks that go from the host to the device."""

    name: str
    pairs: tuple[tuple[int, int], ...]
    num_host_blocks: int = 6
    num_blocks: int = 9
    block_shapes: tuple[tuple[int, ...], ...] = ((4, 2, 3),)
    dtype: torch.dtype = torch.float32


CASES = (
    Case("no pair", ()),
    Case("one pair", ((5, 0),)),
    Case("runs and single blocks", ((0, 4), (1, 5), (2, 8), (3, 2), (4, 3))),
    Case("one block to two", ((2, 0), (2, 7))),
    Case("bfloat16, one run", ((1, 2), (2, 3), (3, 4)), block_shapes=((3, 1, 5),), dtype=torch.bfloat16),
    Case("FP8", ((5, 8), (0, 0)), block_shapes=((3, 1, 5),), dtype=torch.float8_e4m3fn),
    Case("layers of different shapes", ((4, 0), (1, 7)), block_shapes=((4, 2, 8), (4, 1, 4200), (3, 1, 1))),
)


def make(
    case: Case, device: torch.device = CPU, *, seed: int = 0
) -> tuple[list[torch.Tensor], list[torch.Tensor], torch.Tensor]:
    """(caches, their host memory, pairs int64 [n, 2]). Host memory is pinned where the device is a GPU."""
    generator = torch.Generator().manual_seed(seed)
    hosts, caches = (
        [torch.randint(0, 99, (count, *shape), generator=generator).to(case.dtype) for shape in case.block_shapes]
        for count in (case.num_host_blocks, case.num_blocks)
    )
    pairs = torch.tensor(case.pairs, dtype=torch.int64).view(-1, 2)
    if device.type == "cpu":
        return caches, hosts, pairs
    return [cache.to(device) for cache in caches], [host.pin_memory() for host in hosts], pairs
