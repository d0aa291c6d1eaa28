"""The embedding's shrink in Triton: columns of A by token id, straight from the pages."""

from __future__ import annotations

import torch
import triton.language as tl

from kernels.buckets import ceil_div
from kernels.lora.layout import PAGE_RANKS, PagedModule
from kernels.lora.segments import AdapterSegments, padded_block_tokens
from kernels.lora.triton_pages import block_tokens
from kernels.triton_launch import kernel

RANKS = 16  # of one program; a token's column lies rank by rank, so that wider programs read no faster


@kernel(do_not_specialize=["num_slots", "width"])
def embed_kernel(
    token_ids_ptr,
    h_ptr,
    pages_ptr,
    page_ids_ptr,
    first_ptr,
    rank_ptr,
    order_ptr,
    block_slot_ptr,
    block_start_ptr,
    block_end_ptr,
    num_slots,
    in_features,
    width,
    stride_id,
    stride_ht,
    BLOCK_T: tl.constexpr,
    BLOCK_R: tl.constexpr,
    TILE_WIDTH: tl.constexpr,
    PAGE_RANKS: tl.constexpr,
):
    """h [token, rank] = A[slot] [rank, token id], float32; NaN for an id that A has no column of.

    Grid: [blocks, rank tiles].
    """
    block = tl.program_id(0)
    rank_begin = tl.program_id(1) * BLOCK_R
    slot = tl.load(block_slot_ptr + block)
    if (slot >= 0) & (slot < num_slots):
        rank = tl.load(rank_ptr + slot)
        if rank_begin < rank:
            tokens, is_token = block_tokens(order_ptr, block_start_ptr, block_end_ptr, block, BLOCK_T)
            ids = tl.load(token_ids_ptr + tokens * stride_id, mask=is_token, other=0).to(tl.int64)
            is_known = (ids >= 0) & (ids < in_features)
            offs_r = rank_begin + tl.arange(0, BLOCK_R)
            is_a = (is_token & is_known)[:, None] & (offs_r < rank)[None, :]
            tile = ids // TILE_WIDTH
            page_at = tl.load(first_ptr + slot) + (offs_r // PAGE_RANKS) * tl.cdiv(in_features, TILE_WIDTH)
            page = tl.load(page_ids_ptr + page_at[None, :] + tile[:, None], mask=is_a, other=0).to(tl.int64)
            offsets = page * (PAGE_RANKS * TILE_WIDTH) + (offs_r % PAGE_RANKS)[None, :] * TILE_WIDTH
            offsets += (ids - tile * TILE_WIDTH)[:, None]
            a = tl.load(pages_ptr + offsets, mask=is_a, other=0.0).to(tl.float32)
            # A launch cannot raise: what does not fit turns to NaN.
            a = tl.where(is_known[:, None] & (rank <= width), a, float("nan"))
            is_h = is_token[:, None] & (offs_r < tl.minimum(rank, width))[None, :]
            tl.store(h_ptr + (tokens * stride_ht)[:, None] + offs_r[None, :], a, mask=is_h)


def embed(token_ids: torch.Tensor, h: torch.Tensor, module: PagedModule, segments: AdapterSegments) -> None:
    """token_ids [T] into h [T, width]."""
    width = h.shape[1]
    if segments.num_blocks == 0 or width == 0:
        return
    embed_kernel[(segments.num_blocks, ceil_div(width, RANKS))](
        token_ids,
        h,
        module.pages,
        module.page_ids,
        module.first,
        module.rank,
        segments.order,
        segments.block_slot,
        segments.block_start,
        segments.block_end,
        segments.num_slots,
        module.in_features,
        width,
        token_ids.stride(0),
        h.stride(0),
        BLOCK_T=padded_block_tokens(segments.block_tokens),
        BLOCK_R=RANKS,
        TILE_WIDTH=module.pages.shape[2],
        PAGE_RANKS=PAGE_RANKS,
        num_warps=4,
    )
