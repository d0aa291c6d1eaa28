"""Shapes of LoRA products for tests and benchmarks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from kernels.lora.layout import PAGE_RANKS, Epilogue, ModuleGroup, PagedModule, page_values


@dataclass(frozen=True, slots=True)
class Case:
    """One module of one step."""

    name: str
    token_slots: tuple[int, ...]
    ranks: tuple[int, ...]  # by slot; 0: the slot's adapter does not target the module
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
    Case("adapters that no token has", (-1, 2, -1), (8, 4, 16, 3)),
    Case("rank 1", (0, -1, 0), (1,)),
    Case("mixed", (1, 0, -1, 2, 2, 1, -1, 0, 3), (8, 16, 3, 64)),
    Case("module not targeted by one", (0, 1, 2, 1, 0), (8, 0, 4)),
    Case("module targeted by none", (0, 1), (0, 0)),
    Case("odd sizes", (2, 0, 1, -1, 1), (5, 7, 11), 21, 35, 7),
    Case("every width its own page", (0, 1), (8, 9), 37, 1, 1),
    Case("last tiles in part", (0, 2, -1, 1), (8, 17, 3), 37, 51, 16),
    Case("wider pages than widths", (0, -1, 1), (9, 3), 21, 35, 64),
    Case("all ranks", tuple(slot for slot in range(64) for _ in range(1 + slot % 3)), _ALL_RANKS),
    Case("runs of tokens", (0,) * 20 + (-1,) * 7 + (1,) * 33 + (0,) * 5, (8, 32)),
    Case("every token has one", (1,) * 3 + (0,) * 4, (8, 8)),
    Case("strided", (0, 1, -1, 1, 0), (8, 12), is_strided=True),
    Case("large rank", (0, 1, 1), (200, 513)),
)


@dataclass(frozen=True, slots=True)
class Inputs:
    """One case's tensors: one module's weights in pages and as matrices."""

    x: torch.Tensor
    y: torch.Tensor
    token_slots: torch.Tensor
    paged: PagedModule
    matrices: list[tuple[torch.Tensor, torch.Tensor, float]]  # by slot: A, B, scaling


@dataclass(frozen=True, slots=True)
class GroupInputs:
    """One case's tensors for modules that are computed together."""

    x: torch.Tensor
    y: torch.Tensor  # [T, sum of out]
    token_slots: torch.Tensor
    group: ModuleGroup
    max_rank: int


def make(case: Case, dtype: torch.dtype, *, seed: int = 0) -> Inputs:
    """Inputs whose adapters add values of order 1. Unused pages are NaN."""
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
        matrices,
    )


def make_group(
    case: Case,
    out_features: tuple[int, ...],
    dtype: torch.dtype,
    *,
    seed: int = 0,
    is_exact: bool = False,
    is_uniform: bool = False,
) -> GroupInputs:
    """Modules of these widths over one input; module i leaves out slot i, and slot 1 has another rank at each.

    is_uniform: every slot has its rank at every module instead. is_exact: small integers, of which every sum is exact
    in float32 in any order.
    """
    generator = torch.Generator().manual_seed(seed)

    def random(rows: int, width: int, scale: float) -> torch.Tensor:
        if is_exact:
            return torch.randint(-2, 3, (rows, width), generator=generator).to(dtype)
        return (torch.randn(rows, width, generator=generator) * scale).to(dtype)

    by_module = []
    for index, width in enumerate(out_features):
        matrices = []
        for slot, case_rank in enumerate(case.ranks):
            rank = case_rank
            if not is_uniform:
                rank = 0 if slot == index and len(out_features) > 1 else case_rank + (index if slot == 1 else 0)
            a = random(rank, case.in_features, case.in_features**-0.5)
            b = random(rank, width, max(rank, 1) ** -0.5)
            matrices.append((a, b, (1.0, -1.0, 2.0, -2.0)[slot % 4] if is_exact else 0.5 + slot % 4))
        by_module.append(matrices)
    num_tokens = len(case.token_slots)
    padding = 3 if case.is_strided else 0
    x = random(num_tokens, case.in_features + padding, 1.0)[:, padding:]
    y = random(num_tokens, sum(out_features) + padding, 1.0)[:, padding:]
    group = ModuleGroup.of(_paged_modules(case, by_module, out_features, dtype, generator))
    max_rank = max((a.shape[0] for matrices in by_module for a, _, _ in matrices), default=0)
    return GroupInputs(x, y, torch.tensor(case.token_slots, dtype=torch.int32), group, max_rank)


def in_table_of(group: ModuleGroup, num_slots: int) -> ModuleGroup:
    """The group in a slot table of num_slots slots, of which those after its own are empty."""
    empty = num_slots - group.num_slots
    first, rank, scaling = (
        torch.nn.functional.pad(table, (0, empty)) for table in (group.first, group.rank, group.scaling)
    )
    return replace(group, first=first, rank=rank, scaling=scaling)


def with_vectors(
    inputs: GroupInputs, dora_scale: torch.Tensor, lora_bias: torch.Tensor, base_bias: torch.Tensor | None
) -> tuple[GroupInputs, Epilogue]:
    """The same case with vectors in its pages: dora_scale and lora_bias float32 [num_slots, sum of out].

    A slot whose scales at a module are all 1, or biases all 0, gets none. Vectors lie one after the other, from the
    second value of their first page on.
    """
    group = inputs.group
    starts = {"dora_scale": torch.full(group.first.shape, -1), "lora_bias": torch.full(group.first.shape, -1)}
    size = page_values(group.pages).shape[1]
    begin, values = len(group.page_ids) * size, [torch.full((1,), float("nan"))]
    for name, table, nothing in (("dora_scale", dora_scale, 1.0), ("lora_bias", lora_bias, 0.0)):
        for slot in range(group.num_slots):
            for module, vector in enumerate(torch.split(table[slot], list(group.out_features))):
                if (vector != nothing).any():
                    starts[name][module, slot] = begin + sum(map(len, values))
                    values.append(vector)
    joined = torch.cat(values)
    num_pages = -(-len(joined) // size)
    joined = torch.nn.functional.pad(joined, (0, num_pages * size - len(joined)), value=float("nan"))
    extra = joined.view(num_pages, size).flip(0).view(group.pages.dtype).view(num_pages, *group.pages.shape[1:])
    page_ids = torch.arange(num_pages).flip(0).to(torch.int32) + len(group.pages)
    pages = torch.cat([group.pages, extra])
    group = replace(group, pages=pages, page_ids=torch.cat([group.page_ids, page_ids]))
    return replace(inputs, group=group), Epilogue(page_values(pages), base_bias=base_bias, **starts)


def _paged(
    case: Case,
    matrices: Sequence[tuple[torch.Tensor, torch.Tensor, float]],
    dtype: torch.dtype,
    generator: torch.Generator,
) -> PagedModule:
    return _paged_modules(case, [matrices], (case.out_features,), dtype, generator)[0]


def _paged_modules(
    case: Case,
    by_module: Sequence[Sequence[tuple[torch.Tensor, torch.Tensor, float]]],
    out_features: Sequence[int],
    dtype: torch.dtype,
    generator: torch.Generator,
) -> list[PagedModule]:
    """Writes the pages one tile at a time, in shuffled order. Columns past the width are NaN."""
    tiles: list[torch.Tensor] = []
    num_slots = max(len(by_module[0]), 1)
    first = torch.zeros(len(by_module), num_slots, dtype=torch.int32)
    rank = torch.zeros(len(by_module), num_slots, dtype=torch.int32)
    scalings = torch.zeros(len(by_module), num_slots)
    for index, matrices in enumerate(by_module):
        for slot, (a, b, scaling) in enumerate(matrices):
            first[index, slot], rank[index, slot], scalings[index, slot] = len(tiles), a.shape[0], scaling
            for matrix in (a, b):
                for row in range(0, matrix.shape[0], PAGE_RANKS):
                    for column in range(0, matrix.shape[1], case.tile_width):
                        part = matrix[row : row + PAGE_RANKS, column : column + case.tile_width]
                        tile = torch.full((PAGE_RANKS, case.tile_width), float("nan"), dtype=dtype)
                        tile[:, : part.shape[1]] = 0
                        tile[: part.shape[0], : part.shape[1]] = part
                        tiles.append(tile)
    order = torch.randperm(len(tiles) + 2, generator=generator)
    pages = torch.full((len(order), PAGE_RANKS, case.tile_width), float("nan"), dtype=dtype)
    page_ids = order[: len(tiles)].to(torch.int32)
    for position, tile in enumerate(tiles):
        pages[page_ids[position]] = tile
    return [
        PagedModule(pages, page_ids, first[index], rank[index], scalings[index], case.in_features, width)
        for index, width in enumerate(out_features)
    ]
