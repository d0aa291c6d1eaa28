"""Shapes of token_rows for tests and benchmarks."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kernels.lora.layout import PAGE_RANKS, page_values
from kernels.token_rows.layout import RowTable


@dataclass(frozen=True, slots=True)
class Case:
    """One table of rows and the tokens of one step."""

    name: str
    token_slots: tuple[int, ...]
    counts: tuple[int, ...]  # rows of each slot
    width: int = 64
    tile_width: int = 32
    vocab_size: int = 100  # tokens that rows are of
    has_bias: bool = False


CASES = (
    Case("no token", (), (3,)),
    Case("base only", (-1, -1), (3,)),
    Case("one token", (0,), (1,)),
    Case("mixed slots, one without rows", (0, -1, 2, 1, 2, 0, 9), (9, 0, 17), has_bias=True),
    Case("every row", (0, 1, 0, -1), (100, 3)),
    Case("odd width", (1, 1, 0), (8, 21), width=33, tile_width=32, has_bias=True),
)


@dataclass(frozen=True, slots=True)
class Problem:
    """Tensors of a case."""

    table: RowTable
    rows: list[torch.Tensor]  # by slot: [count, width]
    ids: list[torch.Tensor]  # by slot: int64 [count], rising
    biases: list[torch.Tensor]  # by slot: float32 [count]
    token_slots: torch.Tensor  # int32 [T]
    token_ids: torch.Tensor  # int64 [T], half of them replaced where the slot has rows
    slots: list[int]  # in token_slots, with rows


def make(
    case: Case, dtype: torch.dtype = torch.float32, *, seed: int = 0, device: torch.device | str = "cpu"
) -> Problem:
    """Random rows in pages that lie apart."""
    generator = torch.Generator().manual_seed(seed)
    num_slots, num_tiles = len(case.counts), -(-case.width // case.tile_width)
    size = PAGE_RANKS * case.tile_width * dtype.itemsize // 4
    num_matrix = [-(-count // PAGE_RANKS) * num_tiles for count in case.counts]
    num_pages = [pages + -(-2 * count // size) for pages, count in zip(num_matrix, case.counts, strict=True)]
    pages = torch.full((sum(num_pages) + 1, PAGE_RANKS, case.tile_width), float("nan"), dtype=dtype)
    order = torch.randperm(len(pages), generator=generator)
    first, ids_at, bias_at = (torch.zeros(num_slots, dtype=torch.int64) for _ in range(3))
    rows, ids, biases, start = [], [], [], 0
    for slot, count in enumerate(case.counts):
        own = order[start : start + num_pages[slot]]
        rows.append(torch.randn(count, case.width, generator=generator).to(dtype))
        ids.append(torch.randperm(case.vocab_size, generator=generator)[:count].sort().values)
        biases.append(torch.randn(count, generator=generator))
        padded = torch.zeros(-(-count // PAGE_RANKS) * PAGE_RANKS, num_tiles * case.tile_width, dtype=dtype)
        padded[:count, : case.width] = rows[-1]
        tiles = padded.view(-1, PAGE_RANKS, num_tiles, case.tile_width).transpose(1, 2)
        pages[own[: num_matrix[slot]]] = tiles.reshape(-1, PAGE_RANKS, case.tile_width)
        values = torch.zeros((num_pages[slot] - num_matrix[slot]) * size)
        values[:count] = ids[-1].to(torch.int32).view(torch.float32)
        values[count : 2 * count] = biases[-1]
        page_values(pages)[own[num_matrix[slot] :]] = values.view(-1, size)
        first[slot], ids_at[slot] = start, (start + num_matrix[slot]) * size
        bias_at[slot] = ids_at[slot] + count if case.has_bias else -1
        start += num_pages[slot]
    token_slots = torch.tensor(case.token_slots, dtype=torch.int32)
    token_ids = torch.randint(0, case.vocab_size, (len(token_slots),), generator=generator)
    for token, slot in enumerate(case.token_slots):
        if token % 2 == 0 and 0 <= slot < num_slots and case.counts[slot]:
            token_ids[token] = ids[slot][token % case.counts[slot]]
    on_device = pages.to(device)
    counts = torch.tensor(case.counts, dtype=torch.int32)
    table = RowTable(
        pages=on_device,
        values=page_values(on_device),
        page_ids=order.to(device, torch.int32),
        first=first.to(device, torch.int32),
        count=counts.to(device),
        ids=ids_at.to(device),
        bias=bias_at.to(device),
        width=case.width,
    )
    slots = sorted({slot for slot in case.token_slots if 0 <= slot < num_slots and case.counts[slot]})
    return Problem(table, rows, ids, biases, token_slots.to(device), token_ids.to(device), slots)
