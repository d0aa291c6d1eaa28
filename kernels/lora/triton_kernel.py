"""Shrink and expand on pages in Triton, for any mix of ranks in one launch.

A program takes one block of a route: up to BLOCK_T tokens of one slot. It ends at once if the block is not needed, or
if the slot's rank at the site does not reach its ranks; so tokens without an adapter and ranks that others have cost
nothing. Sums are float32 and of a fixed order, without atomics: the sum over the input is cut in NUM_PARTS parts by
the input's width alone, and whether one program computes all parts or each its own plane, they are added in order.
The same token has the same bits in every batch.

Blocks have 16 or 32 rows, so that every product is mma.sync: ptxas before 13.3 miscompiles pipelined wgmma with an
operand in registers. The expand kernel has one (float32 rounded to the weights' dtype) and is not pipelined.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from kernels.lora.layout import PAGE_RANKS, Epilogue, SiteGroup
from kernels.lora.route import MIN_BLOCK_TOKENS, DeviceRoute

PART_COLUMNS = 512  # the least that is worth a program of its own
MAX_PARTS = 16


@dataclass(frozen=True, slots=True)
class Tiles:
    """Sizes of the tiles: powers of two, 16 or more. None of them changes what the sums are."""

    ranks: int  # of a shrink program
    in_columns: int  # of one of its steps
    out_columns: int  # of an expand program

    @classmethod
    def choose(cls, width: int, group: SiteGroup) -> Tiles:
        """For ranks up to `width`. Columns of one page at a time if pages are wide enough."""
        page = group.pages.shape[2]
        columns = min(128, page & -page)
        if columns < 16:
            columns = 64
        return cls(min(64, max(16, triton.next_power_of_2(width))), columns, columns)


# Ranks of one step of an expand program. Fixed, since it decides the order of the sum.
EXPAND_RANKS = 32


def num_parts(in_features: int) -> int:
    """Into how many parts the sum over the input is cut."""
    return min(MAX_PARTS, max(1, in_features // PART_COLUMNS))


@triton.jit
def page_offsets(
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
    """Offsets [R, C] into the pages of a matrix for ranks offs_r and columns from `column` on, and which exist."""
    offs_c = column + tl.arange(0, BLOCK_C)
    ids_ptr = page_ids_ptr + first + (offs_r // PAGE_RANKS) * num_tiles
    in_page = (offs_r % PAGE_RANKS) * TILE_WIDTH
    is_inside = is_rank[:, None] & (offs_c < num_columns)[None, :]
    if TILE_WIDTH % BLOCK_C == 0:  # all columns are of one tile
        page = tl.load(ids_ptr + column // TILE_WIDTH, mask=is_rank & (column < num_columns), other=0).to(tl.int64)
        rows = page * (PAGE_RANKS * TILE_WIDTH) + in_page
        offsets = rows[:, None] + (column % TILE_WIDTH + tl.arange(0, BLOCK_C))[None, :]
    else:
        page = tl.load(ids_ptr[:, None] + (offs_c // TILE_WIDTH)[None, :], mask=is_inside, other=0).to(tl.int64)
        offsets = page * (PAGE_RANKS * TILE_WIDTH) + in_page[:, None] + (offs_c % TILE_WIDTH)[None, :]
    return offsets, is_inside


@triton.jit
def block_tokens(order_ptr, block_start_ptr, block_end_ptr, block, BLOCK_T: tl.constexpr):
    """The tokens of a block as int64 [BLOCK_T], and which of them exist."""
    offs = tl.load(block_start_ptr + block) + tl.arange(0, BLOCK_T)
    is_token = offs < tl.load(block_end_ptr + block)
    return tl.load(order_ptr + offs, mask=is_token, other=0).to(tl.int64), is_token


@triton.jit(do_not_specialize=["width", "stride_hp", "stride_hs"])
def shrink_kernel(
    x_ptr,
    h_ptr,
    pages_ptr,
    page_ids_ptr,
    first_ptr,
    rank_ptr,
    order_ptr,
    block_slot_ptr,
    block_start_ptr,
    block_end_ptr,
    scaling,
    in_features,
    width,
    stride_xt,
    stride_xk,
    stride_hp,
    stride_hs,
    stride_ht,
    stride_table,
    BLOCK_T: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_K: tl.constexpr,
    NUM_PARTS: tl.constexpr,
    PART_STEPS: tl.constexpr,
    HAS_PLANES: tl.constexpr,
    TILE_WIDTH: tl.constexpr,
    PAGE_RANKS: tl.constexpr,
):
    """h [plane, site, token, rank] = scaling * x [token, in] @ A[site, slot].T, float32.

    Grid: [blocks, rank tiles * planes, sites]. Without planes there is one, the sum of all parts.
    """
    block = tl.program_id(0)
    site = tl.program_id(2).to(tl.int64)
    slot = tl.load(block_slot_ptr + block)
    if slot >= 0:
        rank = tl.load(rank_ptr + site * stride_table + slot)
        if HAS_PLANES:
            plane = tl.program_id(1) % NUM_PARTS
            rank_begin = (tl.program_id(1) // NUM_PARTS) * BLOCK_R
            part_begin = plane
            part_end = plane + 1
        else:
            plane = 0
            rank_begin = tl.program_id(1) * BLOCK_R
            part_begin = 0
            part_end = NUM_PARTS
        if rank_begin < rank:
            tokens, is_token = block_tokens(order_ptr, block_start_ptr, block_end_ptr, block, BLOCK_T)
            first = tl.load(first_ptr + site * stride_table + slot)
            offs_r = rank_begin + tl.arange(0, BLOCK_R)
            is_rank = offs_r < rank
            x_rows = x_ptr + tokens * stride_xt
            total = tl.zeros((BLOCK_T, BLOCK_R), tl.float32)
            for part in range(part_begin, part_end):
                acc = tl.zeros((BLOCK_T, BLOCK_R), tl.float32)
                for step in range(0, PART_STEPS):
                    column = (part * PART_STEPS + step) * BLOCK_K
                    offs_k = column + tl.arange(0, BLOCK_K)
                    is_x = is_token[:, None] & (offs_k < in_features)[None, :]
                    x = tl.load(x_rows[:, None] + (offs_k.to(tl.int64) * stride_xk)[None, :], mask=is_x, other=0.0)
                    offsets, is_inside = page_offsets(
                        page_ids_ptr,
                        first,
                        in_features // TILE_WIDTH,
                        offs_r,
                        is_rank,
                        column,
                        in_features,
                        BLOCK_K,
                        TILE_WIDTH,
                        PAGE_RANKS,
                    )
                    a = tl.load(pages_ptr + offsets, mask=is_inside, other=0.0)
                    acc = tl.dot(x, tl.trans(a), acc, input_precision="ieee")
                total += acc
            total *= scaling
            # A launch cannot raise: ranks that h has no room for turn its rows to NaN.
            total = tl.where(rank > width, float("nan"), total)
            h_rows = h_ptr + plane.to(tl.int64) * stride_hp if HAS_PLANES else h_ptr
            h_rows += site * stride_hs + tokens * stride_ht
            is_h = is_token[:, None] & (offs_r < tl.minimum(rank, width))[None, :]
            tl.store(h_rows[:, None] + offs_r[None, :], total, mask=is_h)


@triton.jit(do_not_specialize=["width", "stride_hp", "stride_hs"])
def expand_kernel(
    h_ptr,
    y_ptr,
    pages_ptr,
    page_ids_ptr,
    first_ptr,
    rank_ptr,
    scaling_ptr,
    gain_ptr,
    lora_bias_ptr,
    base_bias_ptr,
    order_ptr,
    block_slot_ptr,
    block_start_ptr,
    block_end_ptr,
    in_tiles,
    width,
    stride_hp,
    stride_hs,
    stride_ht,
    stride_yt,
    stride_yn,
    stride_table,
    stride_gain,
    stride_lora_bias,
    OUT_FEATURES: tl.constexpr,
    NUM_SITES: tl.constexpr,
    ALIGN: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_N: tl.constexpr,
    NUM_PLANES: tl.constexpr,
    ADD_INPUTS: tl.constexpr,
    HAS_GAIN: tl.constexpr,
    HAS_LORA_BIAS: tl.constexpr,
    HAS_BASE_BIAS: tl.constexpr,
    TILE_WIDTH: tl.constexpr,
    PAGE_RANKS: tl.constexpr,
):
    """y [token, columns of site] (+)= scaling[site, slot] * (sum of planes of h) @ B[site, slot], rounded once.

    The sum over ranks is float32, of h rounded to the weights' dtype. Then kernels.lora.layout.Epilogue.
    Grid: [blocks, column tiles, sites].
    """
    block = tl.program_id(0)
    site = tl.program_id(2)
    # Columns of the site: sites lie side by side in y.
    site_begin = 0
    out_features = OUT_FEATURES[0]
    for other in tl.static_range(1, NUM_SITES):
        site_begin += tl.where(site >= other, OUT_FEATURES[other - 1], 0)
        out_features = tl.where(site == other, OUT_FEATURES[other], out_features)
    column = tl.program_id(1) * BLOCK_N
    slot = tl.load(block_slot_ptr + block)
    if (slot >= 0) & (column < out_features):
        table = site.to(tl.int64) * stride_table + slot
        rank = tl.load(rank_ptr + table)
        if rank > 0:
            tokens, is_token = block_tokens(order_ptr, block_start_ptr, block_end_ptr, block, BLOCK_T)
            offs_n = column + tl.arange(0, BLOCK_N)
            is_y = is_token[:, None] & (offs_n < out_features)[None, :]
            y_columns = tl.multiple_of(site_begin + column, ALIGN) + tl.arange(0, BLOCK_N)
            y_at = y_ptr + (tokens * stride_yt)[:, None] + (y_columns.to(tl.int64) * stride_yn)[None, :]
            if ADD_INPUTS:  # asked for before the products, needed after them
                base = tl.load(y_at, mask=is_y, other=0.0).to(tl.float32)
            first = tl.load(first_ptr + table) + tl.cdiv(rank, PAGE_RANKS) * in_tiles  # B lies behind A
            h_rows = h_ptr + site.to(tl.int64) * stride_hs + tokens * stride_ht
            acc = tl.zeros((BLOCK_T, BLOCK_N), tl.float32)
            for rank_begin in range(0, rank, BLOCK_R):
                offs_r = rank_begin + tl.arange(0, BLOCK_R)
                is_rank = offs_r < rank
                is_h = is_token[:, None] & (offs_r < tl.minimum(rank, width))[None, :]
                h = tl.zeros((BLOCK_T, BLOCK_R), tl.float32)
                for plane in tl.static_range(NUM_PLANES):
                    h_plane = h_rows + tl.cast(plane, tl.int64) * stride_hp
                    h += tl.load(h_plane[:, None] + offs_r[None, :], mask=is_h, other=0.0)
                offsets, is_inside = page_offsets(
                    page_ids_ptr,
                    first,
                    out_features // TILE_WIDTH,
                    offs_r,
                    is_rank,
                    column,
                    out_features,
                    BLOCK_N,
                    TILE_WIDTH,
                    PAGE_RANKS,
                )
                b = tl.load(pages_ptr + offsets, mask=is_inside, other=0.0)
                acc = tl.dot(h.to(b.dtype), b, acc, input_precision="ieee")
            is_column = offs_n < out_features
            if HAS_LORA_BIAS:
                lora_bias_at = lora_bias_ptr + slot.to(tl.int64) * stride_lora_bias + y_columns
                acc += tl.load(lora_bias_at, mask=is_column, other=0.0)[None, :]
            acc *= tl.load(scaling_ptr + table)
            if ADD_INPUTS:
                acc += base
            if HAS_GAIN:
                gain_at = gain_ptr + slot.to(tl.int64) * stride_gain + y_columns
                gain = tl.load(gain_at, mask=is_column, other=1.0)[None, :]
                if HAS_BASE_BIAS:
                    bias = tl.load(base_bias_ptr + y_columns, mask=is_column, other=0.0)[None, :]
                    # A gain of 1 changes no bit.
                    acc = tl.where(gain == 1.0, acc, gain * (acc - bias) + bias)
                else:
                    acc *= gain
            tl.store(y_at, acc.to(y_ptr.dtype.element_ty), mask=is_y)


def shrink(
    x: torch.Tensor,
    h: torch.Tensor,
    group: SiteGroup,
    route: DeviceRoute,
    *,
    scaling: float = 1.0,
    parts: int | None = None,
    tiles: Tiles | None = None,
) -> None:
    """x [T, in] into h [planes, sites, T, width]; planes is 1 or `parts` (default num_parts(in))."""
    planes, num_sites, _, width = h.shape
    parts = num_parts(group.in_features) if parts is None else parts
    assert planes in (1, parts), f"{planes} planes for {parts} parts"
    tiles = tiles or Tiles.choose(width, group)
    if route.num_blocks == 0 or width == 0:
        return
    steps = triton.cdiv(group.in_features, tiles.in_columns)
    grid = (route.num_blocks, triton.cdiv(width, tiles.ranks) * planes, num_sites)
    shrink_kernel[grid](
        x,
        h,
        group.pages,
        group.page_ids,
        group.first,
        group.rank,
        route.order,
        route.block_slot,
        route.block_start,
        route.block_end,
        scaling,
        group.in_features,
        width,
        x.stride(0),
        x.stride(1),
        h.stride(0),
        h.stride(1),
        h.stride(2),
        group.first.stride(0),
        BLOCK_T=max(MIN_BLOCK_TOKENS, triton.next_power_of_2(route.block_tokens)),
        BLOCK_R=tiles.ranks,
        BLOCK_K=tiles.in_columns,
        NUM_PARTS=parts,
        PART_STEPS=triton.cdiv(steps, parts),
        HAS_PLANES=planes > 1,
        TILE_WIDTH=group.pages.shape[2],
        PAGE_RANKS=PAGE_RANKS,
        num_warps=4,
        num_stages=3,
    )


def expand(
    h: torch.Tensor,
    y: torch.Tensor,
    group: SiteGroup,
    route: DeviceRoute,
    *,
    add_inputs: bool,
    epilogue: Epilogue | None = None,
    tiles: Tiles | None = None,
) -> None:
    """h [planes, sites, T, width] into y [T, sum of out]. Without add_inputs rows without an adapter are zero."""
    gain, lora_bias, base_bias = (epilogue.gain, epilogue.lora_bias, epilogue.base_bias) if epilogue else (None,) * 3
    planes, num_sites, _, width = h.shape
    tiles = tiles or Tiles.choose(width, group)
    if not add_inputs:
        y.zero_()
    if route.num_blocks == 0 or width == 0:
        return
    grid = (route.num_blocks, triton.cdiv(max(group.out_features), tiles.out_columns), num_sites)
    expand_kernel[grid](
        h,
        y,
        group.pages,
        group.page_ids,
        group.first,
        group.rank,
        group.scaling,
        h if gain is None else gain,
        h if lora_bias is None else lora_bias,
        h if base_bias is None else base_bias,
        route.order,
        route.block_slot,
        route.block_start,
        route.block_end,
        group.in_features // group.pages.shape[2],
        width,
        h.stride(0),
        h.stride(1),
        h.stride(2),
        y.stride(0),
        y.stride(1),
        group.first.stride(0),
        0 if gain is None else gain.stride(0),
        0 if lora_bias is None else lora_bias.stride(0),
        OUT_FEATURES=group.out_features,
        NUM_SITES=num_sites,
        ALIGN=16 if all(features % 16 == 0 for features in group.out_features) else 1,
        BLOCK_T=max(MIN_BLOCK_TOKENS, triton.next_power_of_2(route.block_tokens)),
        BLOCK_R=EXPAND_RANKS,
        BLOCK_N=tiles.out_columns,
        NUM_PLANES=planes,
        ADD_INPUTS=add_inputs,
        HAS_GAIN=gain is not None,
        HAS_LORA_BIAS=lora_bias is not None,
        HAS_BASE_BIAS=base_bias is not None,
        TILE_WIDTH=group.pages.shape[2],
        PAGE_RANKS=PAGE_RANKS,
        num_warps=4,
        num_stages=1,
    )
