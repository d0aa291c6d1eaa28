"""Shapes of copy_blocks for tests and benchmarks."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Case:
    """Caches of one block count, one shape of a block each."""

    name: str
    num_blocks: int
    block_shapes: tuple[tuple[int, ...], ...]
    num_pairs: int
    dtype: torch.dtype = torch.float32


CASES = (
    Case("no pair", 4, ((16, 2, 8),), 0),
    Case("one pair", 4, ((16, 2, 8),), 1),
    Case("layers of different shapes", 9, ((4, 2, 8), (4, 1, 300), (3, 1, 1)), 4),
    Case("bfloat16, odd sizes", 7, ((3, 1, 5), (3, 1, 7)), 3, torch.bfloat16),
    Case("bytes", 6, ((3, 1, 5),), 2, torch.uint8),
    Case("FP8", 6, ((3, 1, 5),), 2, torch.float8_e4m3fn),
)


def make(case: Case, *, seed: int = 0) -> tuple[list[torch.Tensor], torch.Tensor]:
    """Caches and pairs; no block is in two pairs."""
    generator = torch.Generator().manual_seed(seed)
    caches = [
        torch.randint(0, 99, (case.num_blocks, *shape), generator=generator).to(case.dtype)
        for shape in case.block_shapes
    ]
    order = torch.randperm(case.num_blocks, generator=generator)[: 2 * case.num_pairs]
    return caches, order.view(2, case.num_pairs).T.contiguous()
