"""Replaces embeddings and logits of the tokens whose rows an adapter brings: `replace_embeddings`, `replace_logits`.

A row of an adapter is used for the tokens of its slot alone. Everything else keeps its bits.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kernels.devices import check_devices, runs_triton
from kernels.lora import AdapterSegments, ModuleGroup, lora_shrink
from kernels.token_rows import reference
from kernels.token_rows.layout import RowTable

__all__ = ["RowTable", "replace_embeddings", "replace_logits"]


def replace_embeddings(
    y: torch.Tensor,
    token_ids: torch.Tensor,
    token_slots: torch.Tensor,
    table: RowTable,
    slots: Sequence[int],
    *,
    multiplier: float = 1.0,
) -> None:
    """y[t] = row of token_ids[t] * multiplier, of the slot token_slots[t], where that slot replaces the token's row.

    y is [T, width], token_ids int64 [T], token_slots int32 [T], -1 for no adapter; `slots` are those in token_slots
    that replace rows. The multiplier is a value of y's dtype.
    """
    _check_rows("y", y, len(token_ids), table.width, table)
    check_devices(y=y, token_ids=token_ids, token_slots=token_slots, first=table.first)
    if len(token_ids) == 0 or not slots:
        return
    if runs_triton(y):
        from kernels.token_rows import triton_kernel

        triton_kernel.replace_embeddings(y, token_ids, token_slots, table, multiplier)
    else:
        reference.replace_embeddings(y, token_ids, token_slots, table, slots, multiplier)


def replace_logits(
    logits: torch.Tensor,
    x: torch.Tensor,
    row_slots: torch.Tensor,
    segments: AdapterSegments,
    table: RowTable,
    slots: Sequence[int],
    *,
    max_count: int,
) -> None:
    """logits[n, t] = x[n] . row of t + bias of t, of the slot row_slots[n], for the tokens t that the slot replaces.

    logits is [n, vocab], at least as wide as the highest token; x is [n, width]; `slots` are those in row_slots that
    replace rows, of which none has more than max_count. The products are those of a LoRA shrink, so that they have the
    same bits in every batch.
    """
    _check_rows("x", x, len(logits), table.width, table)
    check_devices(logits=logits, x=x, row_slots=row_slots, first=table.first)
    if len(logits) == 0 or not slots:
        return
    ones = torch.ones_like(table.first, dtype=torch.float32)
    rows = ModuleGroup(
        table.pages, table.page_ids, table.first[None], table.count[None], ones[None], table.width, (table.width,)
    )
    h = lora_shrink(x, rows, segments, max_rank=max_count)[:, 0]
    if runs_triton(logits):
        from kernels.token_rows import triton_kernel

        triton_kernel.replace_logits(logits, h, row_slots, table)
    else:
        reference.replace_logits(logits, h, row_slots, table, slots)


def _check_rows(name: str, rows: torch.Tensor, num_rows: int, width: int, table: RowTable) -> None:
    if rows.shape != (num_rows, width) or rows.dtype != table.pages.dtype or rows.stride(1) != 1:
        raise ValueError(
            f"{name} is {rows.dtype} {list(rows.shape)} with strides {rows.stride()}, want {table.pages.dtype} "
            f"[{num_rows}, {width}] with columns side by side"
        )
