"""What the LoRA kernels share: where a page's elements lie, and which tokens a block has.

A program takes one block of segments: up to BLOCK_T tokens of one slot. A program returns at once if its block is
unused or if its rank tile lies beyond the slot's rank, so base-model tokens and other adapters' larger ranks cost
nothing. Sums are float32 in a fixed order, without atomics: the same token has the same bits in every batch.

Blocks have 16 or 32 rows, so that every product is mma.sync: ptxas before 13.3 miscompiles pipelined wgmma with an
operand in registers.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def pages_at(
    page_ids_ptr,
    first,
    num_tiles,
    offs_r,
    is_rank,
    column,
    num_columns,
    BLOCK_C: tl.constexpr,
    TILE_WIDTH: tl.constexpr,
    PAGE_RANKS: tl.constexpr,
):
    """Pages that hold ranks offs_r and BLOCK_C columns from `column` on, its multiple: int32 [R], or [R, C] of several.

    Zero for what does not exist.
    """
    ids_ptr = page_ids_ptr + first + (offs_r // PAGE_RANKS) * num_tiles
    if TILE_WIDTH % BLOCK_C == 0:  # all columns are of one tile
        pages = tl.load(ids_ptr + column // TILE_WIDTH, mask=is_rank & (column < num_columns), other=0)
    else:
        offs_c = column + tl.arange(0, BLOCK_C)
        is_inside = is_rank[:, None] & (offs_c < num_columns)[None, :]
        pages = tl.load(ids_ptr[:, None] + (offs_c // TILE_WIDTH)[None, :], mask=is_inside, other=0)
    return pages


@triton.jit
def page_offsets(
    pages,
    offs_r,
    is_rank,
    column,
    num_columns,
    BLOCK_C: tl.constexpr,
    TILE_WIDTH: tl.constexpr,
    PAGE_RANKS: tl.constexpr,
):
    """Offsets [R, C] into the pages of a matrix for ranks and columns of `pages_at`, and which exist."""
    offs_c = column + tl.arange(0, BLOCK_C)
    in_page = (offs_r % PAGE_RANKS) * TILE_WIDTH
    is_inside = is_rank[:, None] & (offs_c < num_columns)[None, :]
    if TILE_WIDTH % BLOCK_C == 0:
        rows = pages.to(tl.int64) * (PAGE_RANKS * TILE_WIDTH) + in_page
        # Without the hint the values are loaded one by one, and not ahead of their product.
        in_tile = tl.multiple_of(column % TILE_WIDTH, BLOCK_C)
        offsets = rows[:, None] + (in_tile + tl.arange(0, BLOCK_C))[None, :]
    else:
        offsets = pages.to(tl.int64) * (PAGE_RANKS * TILE_WIDTH) + in_page[:, None] + (offs_c % TILE_WIDTH)[None, :]
    return offsets, is_inside


@triton.jit
def load_vector(values_ptr, page_ids_ptr, start, offs, mask, other, PAGE_VALUES: tl.constexpr):
    """float32 values `start + offs` over the pages in the order of page_ids; `other` for all if start is negative."""
    at = start + offs
    mask = mask & (start >= 0)
    page = tl.load(page_ids_ptr + at // PAGE_VALUES, mask=mask, other=0).to(tl.int64)
    return tl.load(values_ptr + page * PAGE_VALUES + at % PAGE_VALUES, mask=mask, other=other)


@triton.jit
def block_tokens(order_ptr, block_start_ptr, block_end_ptr, block, BLOCK_T: tl.constexpr):
    """The tokens of a block as int64 [BLOCK_T], and which of them exist."""
    offs = tl.load(block_start_ptr + block) + tl.arange(0, BLOCK_T)
    is_token = offs < tl.load(block_end_ptr + block)
    return tl.load(order_ptr + offs, mask=is_token, other=0).to(tl.int64), is_token
