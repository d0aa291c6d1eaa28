"""Expand on pages in Triton, for any mix of ranks and widths in one launch, with LoRA bias and DoRA scale."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from kernels.buckets import ceil_div
from kernels.devices import check_devices, device_name
from kernels.lora.launch import ExpandLaunch, Sizes, expand_launch, steps_of_program
from kernels.lora.layout import H_ALIGN, PAGE_RANKS, Epilogue, EpilogueSizes, GroupSizes, ModuleGroup
from kernels.lora.ops import check_h, check_rows
from kernels.lora.segments import AdapterSegments, SegmentSizes, padded_block_tokens
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
from kernels.tensor_spec import TensorSpec, spec_of
from kernels.triton_launch import Prepared, kernel, no_launch, prepare, prepares


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


def expand_numbers(h: TensorSpec, group: GroupSizes, epilogue: EpilogueSizes | None) -> dict[str, Any]:
    """What every kernel takes that expands h [planes, modules, T, width], by name, beside `expand_pointers`."""
    (planes, _, _, width), strides, _, _ = h
    page_values, stride_dora_scale, stride_lora_bias, has_base_bias = epilogue or (1, None, None, False)
    return {
        "in_tiles": ceil_div(group.in_features, group.page_columns),
        "width": width,
        "stride_hp": strides[0],
        "stride_hs": strides[1],
        "stride_ht": strides[2],
        "stride_table": group.stride_table,
        "stride_dora_scale": stride_dora_scale or 0,
        "stride_lora_bias": stride_lora_bias or 0,
        "BLOCK_R": LEAST_EXPAND_RANKS if width <= LEAST_EXPAND_RANKS else EXPAND_RANKS,
        "ONE_STEP": width <= EXPAND_RANKS,
        "NUM_PLANES": planes,
        "H_ALIGN": H_ALIGN if all(n % H_ALIGN == 0 for n in (width, *strides[:3])) else 1,
        "HAS_DORA_SCALE": stride_dora_scale is not None,
        "HAS_LORA_BIAS": stride_lora_bias is not None,
        "HAS_BASE_BIAS": has_base_bias,
        "TILE_WIDTH": group.page_columns,
        "PAGE_RANKS": PAGE_RANKS,
        "PAGE_VALUES": page_values,
    }


def expand_pointers(h: torch.Tensor, group: ModuleGroup, epilogue: Epilogue | None) -> tuple[torch.Tensor, ...]:
    """From h_ptr to base_bias_ptr. A missing table is passed as another pointer, which is not read."""
    weights = (h, group.pages, group.page_ids, group.first, group.scaling)
    if epilogue is None:
        return *weights, h, h, h, h
    tables = (epilogue.dora_scale, epilogue.lora_bias, epilogue.base_bias)
    return *weights, epilogue.values, *(h if table is None else table for table in tables)


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
    vectors = None if epilogue is None else epilogue.sizes
    prepared = _prepare(spec_of(h), spec_of(y), group.sizes, segments.sizes, vectors, add_inputs, launch)
    if not add_inputs:
        y.zero_()
    prepared(
        y,
        group.rank,
        segments.order,
        segments.block_slot,
        segments.block_start,
        segments.block_end,
        *expand_pointers(h, group, epilogue),
    )


@prepares
def _prepare(
    h: TensorSpec,
    y: TensorSpec,
    group: GroupSizes,
    segments: SegmentSizes,
    epilogue: EpilogueSizes | None,
    add_inputs: bool,
    launch: ExpandLaunch | None,
) -> Prepared:
    _, strides, dtype, device = y
    check_rows("y", y, segments, group, sum(group.out_features))
    check_h(h, group, segments)
    check_devices(y=y, h=h)
    if segments.num_blocks == 0:
        return no_launch
    launch = launch or expand_launch(device_name(device), Sizes.of(group, h.shape, max(group.out_features)))
    num_tiles = steps_of_program(segments.num_blocks, ceil_div(sum(group.out_features), launch.out_columns))
    chunk = num_tiles * launch.out_columns
    grid = (segments.num_blocks, sum(ceil_div(width, chunk) for width in group.out_features))
    numbers = {
        "num_slots": segments.num_slots,
        "num_tiles": num_tiles,
        "stride_yt": strides[0],
        "stride_yn": strides[1],
        **expand_numbers(h, group, epilogue),
        "OUT_FEATURES": group.out_features,
        "NUM_MODULES": group.num_modules,
        "ALIGN": 16 if all(features % 16 == 0 for features in group.out_features) else 1,
        "BLOCK_T": padded_block_tokens(segments.block_tokens),
        "BLOCK_N": launch.out_columns,
        "RUNS": runs_of(launch.out_columns, launch.num_warps, dtype.itemsize),
        "ADD_INPUTS": add_inputs,
        "num_warps": launch.num_warps,
        "num_stages": launch.num_stages,
        "enable_fp_fusion": False,
    }
    return prepare(expand_kernel, grid, numbers)
