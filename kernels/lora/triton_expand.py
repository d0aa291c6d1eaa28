"""Expand on pages in Triton, for any mix of ranks and widths in one launch, with LoRA bias and DoRA scale."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from kernels.buckets import ceil_div
from kernels.devices import device_name
from kernels.lora.expansion import Expansion
from kernels.lora.launch import ExpandLaunch, Sizes, expand_launch, steps_of_program
from kernels.lora.layout import H_ALIGN, PAGE_RANKS, Epilogue, ModuleGroup
from kernels.lora.segments import AdapterSegments, padded_block_tokens
from kernels.lora.triton_pages import (
    EXPAND_RANKS,
    LEAST_EXPAND_RANKS,
    b_pages,
    columns_in_runs,
    completed,
    h_of,
    product,
    runs_of,
    spread,
    tokens_in_rows,
)
from kernels.triton_launch import kernel


@triton.jit
def module_of(chunk, chunk_columns, OUT_FEATURES: tl.constexpr, NUM_MODULES: tl.constexpr):
    """Of the module that the chunk is of: (its index, its first column in y, its columns, the chunk's first of these).

    Modules lie side by side, and each is cut in chunks by itself.
    """
    module = 0
    begin = 0
    out_features = OUT_FEATURES[0]
    chunks_before = 0
    for other in tl.static_range(1, NUM_MODULES):
        past = chunks_before + tl.cdiv(out_features, chunk_columns)
        is_past = (module == other - 1) & (chunk >= past)
        module = tl.where(is_past, other, module)
        begin = tl.where(is_past, begin + OUT_FEATURES[other - 1], begin)
        out_features = tl.where(is_past, OUT_FEATURES[other], out_features)
        chunks_before = tl.where(is_past, past, chunks_before)
    return module, begin, out_features, (chunk - chunks_before) * chunk_columns


@triton.jit
def expand_tiles(
    y_ptr,
    tokens,
    is_token,
    slot,
    module,
    first,
    rank,
    scaling,
    h,
    pages,
    column_begin,
    tiles,
    out_features,
    y_begin,
    stride_yt,
    stride_yn,
    h_ptr,
    pages_ptr,
    page_ids_ptr,
    values_ptr,
    dora_scale_ptr,
    lora_bias_ptr,
    base_bias_ptr,
    width,
    stride_hp,
    stride_hs,
    stride_ht,
    stride_dora_scale,
    stride_lora_bias,
    RUNS: tl.constexpr,  # in which `spread` leaves the columns; 1: they are not spread
    ROWS: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_N: tl.constexpr,
    ONE_STEP: tl.constexpr,
    NUM_PLANES: tl.constexpr,
    H_ALIGN: tl.constexpr,
    ADD_INPUTS: tl.constexpr,
    HAS_DORA_SCALE: tl.constexpr,
    HAS_LORA_BIAS: tl.constexpr,
    HAS_BASE_BIAS: tl.constexpr,
    TILE_WIDTH: tl.constexpr,
    PAGE_RANKS: tl.constexpr,
    PAGE_VALUES: tl.constexpr,
):
    """y of a program's tiles of columns."""
    within, is_within = columns_in_runs(BLOCK_T, BLOCK_N, RUNS, ROWS)
    is_row = is_token[:, None] & is_within
    y_rows = y_ptr + (tokens * stride_yt)[:, None]
    # The next tile's values of y are loaded while a tile is computed.
    next_base = tl.zeros((BLOCK_T, BLOCK_N // RUNS), y_ptr.dtype.element_ty)
    if ADD_INPUTS:
        y_at = y_rows + (y_begin + within).to(tl.int64) * stride_yn
        next_base = tl.load(y_at, mask=is_row & (column_begin + within < out_features), other=0.0)
    for tile in range(0, tiles):
        column = column_begin + tile * BLOCK_N
        offs_n = column + within
        is_column = offs_n < out_features
        y_columns = y_begin + tile * BLOCK_N + within
        base = next_base.to(tl.float32)
        if ADD_INPUTS:
            is_next = is_row & (offs_n < out_features - BLOCK_N) & (tile + 1 < tiles)
            y_at = y_rows + (y_columns + BLOCK_N).to(tl.int64) * stride_yn
            next_base = tl.load(y_at, mask=is_next, other=0.0)
        acc = product(
            h, pages, tokens, is_token, module, first, rank, column, out_features, h_ptr, pages_ptr,
            page_ids_ptr, width, stride_hp, stride_hs, stride_ht, BLOCK_T, BLOCK_R, BLOCK_N, ONE_STEP,
            NUM_PLANES, H_ALIGN, TILE_WIDTH, PAGE_RANKS,
        )  # fmt: skip
        # The pages of the next tile, so that its B can be loaded ahead.
        pages = b_pages(
            page_ids_ptr, first, 0, rank, column + BLOCK_N, out_features, BLOCK_R, BLOCK_N, TILE_WIDTH,
            PAGE_RANKS,
        )  # fmt: skip
        if RUNS > 1:
            acc = spread(acc, RUNS, ROWS)
        total = completed(
            acc, base, slot, module, rank, scaling, offs_n, is_column, y_columns, page_ids_ptr,
            values_ptr, dora_scale_ptr, lora_bias_ptr, base_bias_ptr, width, stride_dora_scale,
            stride_lora_bias, ADD_INPUTS, HAS_DORA_SCALE, HAS_LORA_BIAS, HAS_BASE_BIAS, PAGE_VALUES,
        )  # fmt: skip
        y_at = y_rows + y_columns.to(tl.int64) * stride_yn
        tl.store(y_at, total.to(y_ptr.dtype.element_ty), mask=is_row & is_column)


@kernel(do_not_specialize=["num_slots", "num_tiles", "width", "stride_hp", "stride_hs"])
def expand_kernel(
    y_ptr,
    rank_ptr,
    order_ptr,
    block_slot_ptr,
    block_start_ptr,
    block_end_ptr,
    num_slots,
    num_tiles,  # of BLOCK_N columns that a program computes
    stride_yt,
    stride_yn,
    # as `product` and `completed` take them
    h_ptr,
    pages_ptr,
    page_ids_ptr,
    first_ptr,
    scaling_ptr,
    values_ptr,
    dora_scale_ptr,
    lora_bias_ptr,
    base_bias_ptr,
    in_tiles,
    width,
    stride_hp,
    stride_hs,
    stride_ht,
    stride_table,
    stride_dora_scale,
    stride_lora_bias,
    OUT_FEATURES: tl.constexpr,
    NUM_MODULES: tl.constexpr,
    ALIGN: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_N: tl.constexpr,
    RUNS: tl.constexpr,  # of columns that one token is spread in
    ONE_STEP: tl.constexpr,
    NUM_PLANES: tl.constexpr,
    H_ALIGN: tl.constexpr,
    ADD_INPUTS: tl.constexpr,
    HAS_DORA_SCALE: tl.constexpr,
    HAS_LORA_BIAS: tl.constexpr,
    HAS_BASE_BIAS: tl.constexpr,
    TILE_WIDTH: tl.constexpr,
    PAGE_RANKS: tl.constexpr,
    PAGE_VALUES: tl.constexpr,
):
    """y [token, columns of module] (+)= scaling[module, slot] * (sum of planes of h) @ B[module, slot], rounded once.

    The sum over ranks is float32, of h rounded to the weights' dtype. Then kernels.lora.layout.Epilogue.
    Grid: [blocks, chunks of num_tiles tiles of each module's columns].
    """
    block = tl.program_id(0)
    module, module_begin, out_features, column_begin = module_of(
        tl.program_id(1), num_tiles * BLOCK_N, OUT_FEATURES, NUM_MODULES
    )
    # What depends on nothing but the last load is loaded before anything waits for it.
    slot = tl.load(block_slot_ptr + block)
    start = tl.load(block_start_ptr + block)
    end = tl.load(block_end_ptr + block)
    if (slot >= 0) & (slot < num_slots):
        table = module.to(tl.int64) * stride_table + slot
        rank = tl.load(rank_ptr + table)
        first = tl.load(first_ptr + table)
        scaling = tl.load(scaling_ptr + table)
        tokens, is_token = tokens_in_rows(order_ptr, start, end, BLOCK_T, RUNS)
        if rank > 0:
            first += tl.cdiv(rank, PAGE_RANKS) * in_tiles  # B lies behind A
            pages = b_pages(
                page_ids_ptr, first, 0, rank, column_begin, out_features, BLOCK_R, BLOCK_N, TILE_WIDTH, PAGE_RANKS
            )
            h = h_of(
                h_ptr, tokens, is_token, module, 0, rank, width, stride_hp, stride_hs, stride_ht, BLOCK_T, BLOCK_R,
                NUM_PLANES, H_ALIGN,
            )  # fmt: skip
            tiles = tl.minimum(num_tiles, tl.cdiv(out_features - column_begin, BLOCK_N))
            y_begin = tl.multiple_of(module_begin + column_begin, ALIGN)
            arguments = (
                y_ptr, tokens, is_token, slot, module, first, rank, scaling, h, pages, column_begin, tiles,
                out_features, y_begin, stride_yt, stride_yn, h_ptr, pages_ptr, page_ids_ptr, values_ptr,
                dora_scale_ptr, lora_bias_ptr, base_bias_ptr, width, stride_hp, stride_hs, stride_ht,
                stride_dora_scale, stride_lora_bias,
            )  # fmt: skip
            if RUNS == 1:
                expand_tiles(
                    *arguments, 1, BLOCK_T, BLOCK_T, BLOCK_R, BLOCK_N, ONE_STEP, NUM_PLANES, H_ALIGN,
                    ADD_INPUTS, HAS_DORA_SCALE, HAS_LORA_BIAS, HAS_BASE_BIAS, TILE_WIDTH, PAGE_RANKS, PAGE_VALUES,
                )  # fmt: skip
            elif end - start == 1:
                expand_tiles(
                    *arguments, RUNS, 1, BLOCK_T, BLOCK_R, BLOCK_N, ONE_STEP, NUM_PLANES, H_ALIGN,
                    ADD_INPUTS, HAS_DORA_SCALE, HAS_LORA_BIAS, HAS_BASE_BIAS, TILE_WIDTH, PAGE_RANKS, PAGE_VALUES,
                )  # fmt: skip
            elif end - start <= BLOCK_T // 2:
                expand_tiles(
                    *arguments, 2, BLOCK_T // 2, BLOCK_T, BLOCK_R, BLOCK_N, ONE_STEP, NUM_PLANES, H_ALIGN,
                    ADD_INPUTS, HAS_DORA_SCALE, HAS_LORA_BIAS, HAS_BASE_BIAS, TILE_WIDTH, PAGE_RANKS, PAGE_VALUES,
                )  # fmt: skip
            else:
                expand_tiles(
                    *arguments, 1, BLOCK_T, BLOCK_T, BLOCK_R, BLOCK_N, ONE_STEP, NUM_PLANES, H_ALIGN,
                    ADD_INPUTS, HAS_DORA_SCALE, HAS_LORA_BIAS, HAS_BASE_BIAS, TILE_WIDTH, PAGE_RANKS, PAGE_VALUES,
                )  # fmt: skip


def expand_arguments(h: torch.Tensor, group: ModuleGroup, epilogue: Epilogue | None) -> dict[str, Any]:
    """What every kernel takes that expands h [planes, modules, T, width], by the names of `expanded`; and rank_ptr."""
    dora_scale, lora_bias, base_bias = (
        (epilogue.dora_scale, epilogue.lora_bias, epilogue.base_bias) if epilogue else (None,) * 3
    )
    values = h if epilogue is None else epilogue.values
    # A missing table is passed as another pointer, which is not read.
    return {
        "h_ptr": h,
        "pages_ptr": group.pages,
        "page_ids_ptr": group.page_ids,
        "first_ptr": group.first,
        "rank_ptr": group.rank,
        "scaling_ptr": group.scaling,
        "values_ptr": values,
        "dora_scale_ptr": h if dora_scale is None else dora_scale,
        "lora_bias_ptr": h if lora_bias is None else lora_bias,
        "base_bias_ptr": h if base_bias is None else base_bias,
        "in_tiles": ceil_div(group.in_features, group.pages.shape[2]),
        "width": h.shape[3],
        "stride_hp": h.stride(0),
        "stride_hs": h.stride(1),
        "stride_ht": h.stride(2),
        "stride_table": group.first.stride(0),
        "stride_dora_scale": 0 if dora_scale is None else dora_scale.stride(0),
        "stride_lora_bias": 0 if lora_bias is None else lora_bias.stride(0),
        "BLOCK_R": LEAST_EXPAND_RANKS if h.shape[3] <= LEAST_EXPAND_RANKS else EXPAND_RANKS,
        "ONE_STEP": h.shape[3] <= EXPAND_RANKS,
        "NUM_PLANES": h.shape[0],
        "H_ALIGN": H_ALIGN if all(n % H_ALIGN == 0 for n in (h.shape[3], *h.stride()[:3])) else 1,
        "HAS_DORA_SCALE": dora_scale is not None,
        "HAS_LORA_BIAS": lora_bias is not None,
        "HAS_BASE_BIAS": base_bias is not None,
        "TILE_WIDTH": group.pages.shape[2],
        "PAGE_RANKS": PAGE_RANKS,
        "PAGE_VALUES": 1 if epilogue is None else values.shape[1],
    }


def folded_arguments(expansion: Expansion) -> dict[str, Any]:
    """What every kernel takes that expands on the way to something else, by name: the same bits as an expand's own."""
    y, group, segments = expansion.y, expansion.group, expansion.segments
    assert segments.token_slots is not None, "columns_of_tiles says that there is no tile"
    return {
        "y_ptr": y,
        "token_slots_ptr": segments.token_slots,
        "num_slots": segments.num_slots,
        "stride_yt": y.stride(0),
        **expand_arguments(expansion.h, group, expansion.epilogue),
    }


def expand(
    h: torch.Tensor,
    y: torch.Tensor,
    group: ModuleGroup,
    segments: AdapterSegments,
    *,
    add_inputs: bool,
    epilogue: Epilogue | None = None,
    launch: ExpandLaunch | None = None,
) -> None:
    """h [planes, modules, T, width] into y [T, sum of out]. Without add_inputs rows without an adapter are zero."""
    if not add_inputs:
        y.zero_()
    if segments.num_blocks == 0:
        return
    launch = launch or expand_launch(device_name(y), Sizes.of_expand(y, h, group))
    num_tiles = steps_of_program(segments.num_blocks, ceil_div(sum(group.out_features), launch.out_columns))
    chunk = num_tiles * launch.out_columns
    grid = (segments.num_blocks, sum(ceil_div(width, chunk) for width in group.out_features))
    expand_kernel[grid](
        y_ptr=y,
        order_ptr=segments.order,
        block_slot_ptr=segments.block_slot,
        block_start_ptr=segments.block_start,
        block_end_ptr=segments.block_end,
        num_slots=segments.num_slots,
        num_tiles=num_tiles,
        stride_yt=y.stride(0),
        stride_yn=y.stride(1),
        **expand_arguments(h, group, epilogue),
        OUT_FEATURES=group.out_features,
        NUM_MODULES=group.num_modules,
        ALIGN=16 if all(features % 16 == 0 for features in group.out_features) else 1,
        BLOCK_T=padded_block_tokens(segments.block_tokens),
        BLOCK_N=launch.out_columns,
        RUNS=runs_of(launch.out_columns, launch.num_warps, y.element_size()),
        ADD_INPUTS=add_inputs,
        num_warps=launch.num_warps,
        num_stages=launch.num_stages,
        enable_fp_fusion=False,
    )
