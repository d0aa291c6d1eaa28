"""Shapes of add_lora for tests and benchmarks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from kernels.lora.layout import PAGE_RANKS, PagedSite, StackedSite, stack_columns


@dataclass(frozen=True, slots=True)
class Case:
    """One site of one step."""

    name: str
    token_slots: tuple[int, ...]
    ranks: tuple[int, ...]  # by slot; 0: the slot's adapter does not target the site
    in_features: int = 48
    out_features: int = 32
    tile_width: int = 16
    is_strided: bool = False  # y is a column slice of a fused output, x of a wider input


_ALL_RANKS = tuple(range(1, 65))

CASES = (
    Case("no token", (), (8,)),
    Case("one token", (0,), (8,)),
    Case("one token without adapter", (-1,), (8,)),
    Case("no adapter at all", (-1,) * 5, ()),
    Case("adapters nobody uses", (-1, 2, -1), (8, 4, 16, 3)),
    Case("rank 1", (0, -1, 0), (1,)),
    Case("mixed", (1, 0, -1, 2, 2, 1, -1, 0, 3), (8, 16, 3, 64)),
    Case("site not targeted by one", (0, 1, 2, 1, 0), (8, 0, 4)),
    Case("site targeted by none", (0, 1), (0, 0)),
    Case("odd sizes", (2, 0, 1, -1, 1), (5, 7, 11), 21, 35, 7),
    Case("every width its own page", (0, 1), (8, 9), 37, 1, 1),
    Case("all ranks", tuple(slot for slot in range(64) for _ in range(1 + slot % 3)), _ALL_RANKS),
    Case("runs of tokens", (0,) * 20 + (-1,) * 7 + (1,) * 33 + (0,) * 5, (8, 32)),
    Case("every token has one", (1,) * 3 + (0,) * 4, (8, 8)),
    Case("strided", (0, 1, -1, 1, 0), (8, 12), is_strided=True),
    Case("large rank", (0, 1, 1), (200, 513)),
)


def decode_case(in_features: int, out_features: int) -> Case:
    """32 tokens over 16 adapters of rank 32."""
    slots = tuple(token % 16 for token in range(32))
    return Case(f"{in_features}x{out_features}", slots, (32,) * 16, in_features, out_features, 256)


@dataclass(frozen=True, slots=True)
class Inputs:
    """One case's tensors: the same weights paged and stacked."""

    x: torch.Tensor
    y: torch.Tensor
    token_slots: torch.Tensor
    paged: PagedSite
    stacked: StackedSite
    matrices: list[tuple[torch.Tensor, torch.Tensor, float]]  # by slot: A, B, scaling


def make(case: Case, dtype: torch.dtype, *, seed: int = 0) -> Inputs:
    """Inputs whose adapters add values of order 1. Pages of nobody are NaN."""
    generator = torch.Generator().manual_seed(seed)

    def random(rows: int, width: int, scale: float) -> torch.Tensor:
        return (torch.randn(rows, width, generator=generator) * scale).to(dtype)

    matrices = []
    for slot, rank in enumerate(case.ranks):
        a = random(rank, case.in_features, case.in_features**-0.5)
        b = random(rank, case.out_features, max(rank, 1) ** -0.5)
        matrices.append((a, b, 0.5 + slot % 4))
    num_tokens = len(case.token_slots)
    padding = 3 if case.is_strided else 0
    x = random(num_tokens, case.in_features + padding, 1.0)[:, padding:]
    y = random(num_tokens, case.out_features + padding, 1.0)[:, padding:]
    return Inputs(
        x,
        y,
        torch.tensor(case.token_slots, dtype=torch.int32),
        _paged(case, matrices, dtype, generator),
        _stacked(case, matrices, dtype),
        matrices,
    )


def _stacked(
    case: Case, matrices: Sequence[tuple[torch.Tensor, torch.Tensor, float]], dtype: torch.dtype
) -> StackedSite:
    members = [(slot, a.shape[0], scaling) for slot, (a, _, scaling) in enumerate(matrices) if a.shape[0]]
    a = torch.cat([torch.empty(0, case.in_features, dtype=dtype), *(a for a, _, _ in matrices)])
    b = torch.cat([torch.empty(0, case.out_features, dtype=dtype), *(b for _, b, _ in matrices)])
    return StackedSite(a, b, stack_columns(members, torch.device("cpu")))


def _paged(
    case: Case,
    matrices: Sequence[tuple[torch.Tensor, torch.Tensor, float]],
    dtype: torch.dtype,
    generator: torch.Generator,
) -> PagedSite:
    """Writes the pages one tile at a time, in shuffled order."""
    tiles: list[torch.Tensor] = []
    first: list[int] = []
    for a, b, _ in matrices:
        first.append(len(tiles))
        for matrix in (a, b):
            for row in range(0, matrix.shape[0], PAGE_RANKS):
                for column in range(0, matrix.shape[1], case.tile_width):
                    tile = torch.zeros(PAGE_RANKS, case.tile_width, dtype=dtype)
                    part = matrix[row : row + PAGE_RANKS, column : column + case.tile_width]
                    tile[: part.shape[0]] = part
                    tiles.append(tile)
    num_slots = max(len(matrices), 1)
    order = torch.randperm(len(tiles) + 2, generator=generator)
    pages = torch.full((len(order), PAGE_RANKS, case.tile_width), float("nan"), dtype=dtype)
    page_ids = order[: len(tiles)].to(torch.int32)
    for index, tile in enumerate(tiles):
        pages[page_ids[index]] = tile
    return PagedSite(
        pages,
        page_ids,
        torch.tensor([*first, *[0] * (num_slots - len(first))], dtype=torch.int32),
        torch.tensor([*case.ranks, *[0] * (num_slots - len(case.ranks))], dtype=torch.int32),
        torch.tensor([*(s for _, _, s in matrices), *[0.0] * (num_slots - len(matrices))]),
        case.in_features,
        case.out_features,
    )
