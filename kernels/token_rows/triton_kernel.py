"""token_rows on the GPU: one launch for the tokens of all slots."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.buckets import ceil_div
from kernels.lora.layout import PAGE_RANKS
from kernels.lora.triton_pages import load_vector
from kernels.token_rows.layout import RowTable
from kernels.triton_launch import kernel

COLUMNS = 1024  # of one program
MAX_BLOCK = 1024  # rows of a program over logits


@triton.jit
def _load_id(values_ptr, page_ids_ptr, at, PAGE_VALUES: tl.constexpr):
    """The int32 at value `at` over the pages in the order of page_ids."""
    page = tl.load(page_ids_ptr + at // PAGE_VALUES).to(tl.int64)
    return tl.load(values_ptr + page * PAGE_VALUES + at % PAGE_VALUES).to(tl.int32, bitcast=True)


@kernel(do_not_specialize=["num_slots"])
def embeddings_kernel(
    y_ptr,
    token_ids_ptr,
    token_slots_ptr,
    pages_ptr,
    values_ptr,
    page_ids_ptr,
    first_ptr,
    count_ptr,
    ids_ptr,
    num_slots,
    width,
    multiplier,
    stride_id,
    stride_yt,
    BLOCK: tl.constexpr,
    TILE_WIDTH: tl.constexpr,
    PAGE_RANKS: tl.constexpr,
    PAGE_VALUES: tl.constexpr,
):
    """y [token] = the slot's row of the token's id * multiplier, where the slot has one. Binary search over the ids.

    Grid: [tokens, chunks of columns].
    """
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(token_slots_ptr + token)
    if (slot >= 0) & (slot < num_slots):
        count = tl.load(count_ptr + slot)
        if count > 0:
            wanted = tl.load(token_ids_ptr + token * stride_id).to(tl.int32)
            start = tl.load(ids_ptr + slot)
            low = 0
            high = count
            while low < high:
                middle = (low + high) // 2
                if _load_id(values_ptr, page_ids_ptr, start + middle, PAGE_VALUES) < wanted:
                    low = middle + 1
                else:
                    high = middle
            at = tl.minimum(low, count - 1)
            if _load_id(values_ptr, page_ids_ptr, start + at, PAGE_VALUES) == wanted:
                offs = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
                is_inside = offs < width
                page_at = tl.load(first_ptr + slot) + (at // PAGE_RANKS) * tl.cdiv(width, TILE_WIDTH)
                page = tl.load(page_ids_ptr + page_at + offs // TILE_WIDTH, mask=is_inside, other=0).to(tl.int64)
                offsets = page * (PAGE_RANKS * TILE_WIDTH) + (at % PAGE_RANKS) * TILE_WIDTH + offs % TILE_WIDTH
                row = tl.load(pages_ptr + offsets, mask=is_inside, other=0.0).to(tl.float32)
                tl.store(y_ptr + token * stride_yt + offs, row * multiplier, mask=is_inside)


@kernel(do_not_specialize=["num_slots", "stride_hp"])
def logits_kernel(
    logits_ptr,
    h_ptr,
    row_slots_ptr,
    values_ptr,
    page_ids_ptr,
    count_ptr,
    ids_ptr,
    bias_ptr,
    num_slots,
    stride_lt,
    stride_hp,
    stride_ht,
    NUM_PLANES: tl.constexpr,
    BLOCK: tl.constexpr,
    PAGE_VALUES: tl.constexpr,
):
    """logits [row, id of j] = sum of planes of h [row, j] + bias [j], rounded once, for the rows j of the row's slot.

    Grid: [rows, chunks of replaced rows].
    """
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(row_slots_ptr + row)
    if (slot >= 0) & (slot < num_slots):
        count = tl.load(count_ptr + slot)
        offs = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        if tl.program_id(1) * BLOCK < count:
            is_row = offs < count
            ids = load_vector(values_ptr, page_ids_ptr, tl.load(ids_ptr + slot), offs, is_row, 0.0, PAGE_VALUES)
            total = load_vector(values_ptr, page_ids_ptr, tl.load(bias_ptr + slot), offs, is_row, 0.0, PAGE_VALUES)
            product = tl.zeros((BLOCK,), tl.float32)
            for plane in tl.static_range(NUM_PLANES):
                at = h_ptr + tl.cast(plane, tl.int64) * stride_hp + row * stride_ht
                product += tl.load(at + offs, mask=is_row, other=0.0)
            token_ids = ids.to(tl.int32, bitcast=True)
            tl.store(logits_ptr + row * stride_lt + token_ids, product + total, mask=is_row)


def replace_embeddings(
    y: torch.Tensor, token_ids: torch.Tensor, token_slots: torch.Tensor, table: RowTable, multiplier: float
) -> None:
    """See the package."""
    block = min(COLUMNS, triton.next_power_of_2(table.width))
    embeddings_kernel[(len(token_ids), ceil_div(table.width, block))](
        y,
        token_ids,
        token_slots,
        table.pages,
        table.values,
        table.page_ids,
        table.first,
        table.count,
        table.ids,
        table.num_slots,
        table.width,
        multiplier,
        token_ids.stride(0),
        y.stride(0),
        BLOCK=block,
        TILE_WIDTH=table.pages.shape[2],
        PAGE_RANKS=PAGE_RANKS,
        PAGE_VALUES=table.values.shape[1],
    )


def replace_logits(logits: torch.Tensor, h: torch.Tensor, row_slots: torch.Tensor, table: RowTable) -> None:
    """h [planes, n, width] into logits [n, vocab]."""
    planes, num_rows, width = h.shape
    logits_kernel[(num_rows, ceil_div(width, MAX_BLOCK))](
        logits,
        h,
        row_slots,
        table.values,
        table.page_ids,
        table.count,
        table.ids,
        table.bias,
        table.num_slots,
        logits.stride(0),
        h.stride(0),
        h.stride(1),
        NUM_PLANES=planes,
        BLOCK=MAX_BLOCK,
        PAGE_VALUES=table.values.shape[1],
    )
