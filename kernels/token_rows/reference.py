"""The definitions, slot by slot in torch. Also what every device but a GPU with Triton runs."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kernels.lora.layout import PAGE_RANKS
from kernels.token_rows.layout import RowTable


def replace_embeddings(
    y: torch.Tensor,
    token_ids: torch.Tensor,
    token_slots: torch.Tensor,
    table: RowTable,
    slots: Sequence[int],
    multiplier: float,
) -> None:
    """See the package."""
    scale = torch.tensor(multiplier, dtype=y.dtype, device=y.device)
    for slot in slots:
        count = int(table.count[slot])
        tokens = (token_slots == slot).nonzero().flatten()
        if count == 0 or len(tokens) == 0:
            continue
        ids, wanted = row_ids(table, slot), token_ids[tokens].to(torch.int32)
        at = torch.searchsorted(ids, wanted).clamp_(max=count - 1)
        is_replaced = ids[at] == wanted
        y[tokens[is_replaced]] = gather(table, slot, at[is_replaced]) * scale


def replace_logits(
    logits: torch.Tensor, h: torch.Tensor, row_slots: torch.Tensor, table: RowTable, slots: Sequence[int]
) -> None:
    """logits [n, vocab] of the replaced tokens become h [planes, n, width] + bias, in float32, rounded once."""
    products = h[0] if len(h) == 1 else h.sum(0)
    for slot in slots:
        count = int(table.count[slot])
        rows = (row_slots == slot).nonzero().flatten()
        if count == 0 or len(rows) == 0:
            continue
        values = products[rows, :count]
        if int(table.bias[slot]) >= 0:
            values = values + _values(table, int(table.bias[slot]), count)
        logits[rows[:, None], row_ids(table, slot).long()[None, :]] = values.to(logits.dtype)


def row_ids(table: RowTable, slot: int) -> torch.Tensor:
    """int32 [count], rising: the token ids of a slot's rows."""
    return _values(table, int(table.ids[slot]), int(table.count[slot])).view(torch.int32)


def gather(table: RowTable, slot: int, at: torch.Tensor) -> torch.Tensor:
    """The rows of a slot at these indices, [len(at), width]."""
    num_tiles = -(-table.width // table.pages.shape[2])
    tiles = torch.arange(num_tiles, device=at.device)
    page = table.page_ids[int(table.first[slot]) + (at // PAGE_RANKS * num_tiles)[:, None] + tiles].long()
    return table.pages[page, (at % PAGE_RANKS)[:, None]].flatten(1)[:, : table.width]


def _values(table: RowTable, start: int, count: int) -> torch.Tensor:
    size = table.values.shape[1]
    begin, end = start // size, -(-(start + count) // size)
    lines = table.values[table.page_ids[begin:end].long()].reshape(-1)
    return lines[start - begin * size :][:count]
