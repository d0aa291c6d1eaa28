"""gated_activation of what an expand completes, in one launch. Blocks of tokens of one slot share what they read.

The values are rounded where the expand would have stored them, so the bits are those of two launches.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.buckets import ceil_div
from kernels.devices import check_devices
from kernels.gated_activation.triton_kernel import gated
from kernels.lora.expansion import Expansion, columns_of_tiles
from kernels.lora.launch import steps_of_program
from kernels.lora.layout import EpilogueSizes, GroupSizes
from kernels.lora.ops import check_h, check_rows
from kernels.lora.segments import MIN_BLOCK_TOKENS, SegmentSizes, padded_block_tokens
from kernels.lora.triton_expand import expand_numbers, expand_pointers
from kernels.lora.triton_pages import (
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

NUM_WARPS, NUM_STAGES = 4, 2
# Of a thread in decode steps, so that seven programs fit on a multiprocessor in place of five. With 64 adapters the
# launch takes 28 us on an H100, without the limit 31.
FEW_REGISTERS = 72


@triton.jit
def half(
    base,  # float32 [rows, N]
    h,
    pages,
    tokens,
    is_row,
    slot,
    module,
    first,
    rank,
    scaling,
    column,  # of the module
    out_features,
    offs_n,
    is_column,
    y_columns,
    dtype: tl.constexpr,
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
    BLOCK_T: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_N: tl.constexpr,
    RUNS: tl.constexpr,
    ROWS: tl.constexpr,
    ONE_STEP: tl.constexpr,
    NUM_PLANES: tl.constexpr,
    H_ALIGN: tl.constexpr,
    HAS_DORA_SCALE: tl.constexpr,
    HAS_LORA_BIAS: tl.constexpr,
    HAS_BASE_BIAS: tl.constexpr,
    TILE_WIDTH: tl.constexpr,
    PAGE_RANKS: tl.constexpr,
    PAGE_VALUES: tl.constexpr,
):
    """A tile of gate or up, rounded as an expand would store it."""
    acc = product(
        h, pages, tokens, is_row, module, first, rank, column, out_features, h_ptr, pages_ptr, page_ids_ptr, width,
        stride_hp, stride_hs, stride_ht, BLOCK_T, BLOCK_R, BLOCK_N, ONE_STEP, NUM_PLANES, H_ALIGN, TILE_WIDTH,
        PAGE_RANKS,
    )  # fmt: skip
    if RUNS > 1:
        acc = spread(acc, RUNS, ROWS)
    total = completed(
        acc, base, slot, module, rank, scaling, offs_n, is_column, y_columns, page_ids_ptr, values_ptr,
        dora_scale_ptr, lora_bias_ptr, base_bias_ptr, width, stride_dora_scale, stride_lora_bias, True,
        HAS_DORA_SCALE, HAS_LORA_BIAS, HAS_BASE_BIAS, PAGE_VALUES,
    )  # fmt: skip
    return total.to(dtype).to(tl.float32)


@triton.jit
def y_tile(y_rows, offs_n, is_row, WIDTH: tl.constexpr):
    """gate and up of some columns."""
    is_y = is_row & (offs_n < WIDTH)
    gate = tl.load(y_rows + offs_n, mask=is_y, other=0.0)
    return gate, tl.load(y_rows + (WIDTH + offs_n), mask=is_y, other=0.0)


@triton.jit
def gate_tiles(
    y_rows,  # [T, 1]
    out_rows,  # [T, 1]
    tokens,
    is_token,
    slot,
    module,
    first,
    rank,
    scaling,
    h,
    pages,
    last,
    up_first,
    up_rank,
    up_scaling,
    up_h,
    up_pages,
    column_begin,
    up_begin,
    tiles,
    out_features,
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
    dtype: tl.constexpr,
    WIDTH: tl.constexpr,
    ACTIVATION: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_N: tl.constexpr,
    ONE_STEP: tl.constexpr,
    NUM_PLANES: tl.constexpr,
    H_ALIGN: tl.constexpr,
    HAS_DORA_SCALE: tl.constexpr,
    HAS_LORA_BIAS: tl.constexpr,
    HAS_BASE_BIAS: tl.constexpr,
    TILE_WIDTH: tl.constexpr,
    PAGE_RANKS: tl.constexpr,
    PAGE_VALUES: tl.constexpr,
):
    """out of a program's tiles of columns."""
    within, is_within = columns_in_runs(BLOCK_T, BLOCK_N, RUNS, ROWS)
    is_row = is_token[:, None] & is_within
    # The next tile's values of y are loaded while a tile is computed, unless that takes too many registers.
    IS_AHEAD: tl.constexpr = RUNS > 1
    if IS_AHEAD:
        next_gate, next_up = y_tile(y_rows, column_begin + within, is_row, WIDTH)
    for tile in range(0, tiles):
        column = column_begin + tile * BLOCK_N
        up_column = up_begin + tile * BLOCK_N
        offs_n = column + within
        is_column = offs_n < WIDTH
        if IS_AHEAD:
            gate, up = next_gate.to(tl.float32), next_up.to(tl.float32)
            next_gate, next_up = y_tile(y_rows, offs_n + BLOCK_N, is_row & (tile + 1 < tiles), WIDTH)
        else:
            gate, up = y_tile(y_rows, offs_n, is_row, WIDTH)
            gate, up = gate.to(tl.float32), up.to(tl.float32)
        gate = half(
            gate, h, pages, tokens, is_token, slot, module, first, rank, scaling, column, out_features,
            offs_n, is_column, offs_n, dtype, h_ptr, pages_ptr, page_ids_ptr, values_ptr, dora_scale_ptr,
            lora_bias_ptr, base_bias_ptr, width, stride_hp, stride_hs, stride_ht, stride_dora_scale,
            stride_lora_bias, BLOCK_T, BLOCK_R, BLOCK_N, RUNS, ROWS, ONE_STEP, NUM_PLANES, H_ALIGN,
            HAS_DORA_SCALE, HAS_LORA_BIAS, HAS_BASE_BIAS, TILE_WIDTH, PAGE_RANKS, PAGE_VALUES,
        )  # fmt: skip
        up = half(
            up, up_h, up_pages, tokens, is_token, slot, last, up_first, up_rank, up_scaling, up_column,
            out_features, up_column + within, is_column, WIDTH + offs_n, dtype, h_ptr, pages_ptr,
            page_ids_ptr, values_ptr, dora_scale_ptr, lora_bias_ptr, base_bias_ptr, width, stride_hp,
            stride_hs, stride_ht, stride_dora_scale, stride_lora_bias, BLOCK_T, BLOCK_R, BLOCK_N, RUNS,
            ROWS, ONE_STEP, NUM_PLANES, H_ALIGN, HAS_DORA_SCALE, HAS_LORA_BIAS, HAS_BASE_BIAS, TILE_WIDTH,
            PAGE_RANKS, PAGE_VALUES,
        )  # fmt: skip
        # The pages of the next tile, so that its B can be loaded ahead.
        pages = b_pages(
            page_ids_ptr, first, 0, rank, column + BLOCK_N, out_features, BLOCK_R, BLOCK_N, TILE_WIDTH,
            PAGE_RANKS,
        )  # fmt: skip
        up_pages = b_pages(
            page_ids_ptr, up_first, 0, up_rank, up_column + BLOCK_N, out_features, BLOCK_R, BLOCK_N,
            TILE_WIDTH, PAGE_RANKS,
        )  # fmt: skip
        tl.store(out_rows + offs_n, gated(gate, up, ACTIVATION).to(dtype), mask=is_row & is_column)


@kernel(do_not_specialize=["num_tokens", "num_blocks", "num_slots", "num_tiles", "width", "stride_hp", "stride_hs"])
def gate_expand_kernel(
    out_ptr,  # [T, WIDTH], contiguous
    y_ptr,  # [T, 2 WIDTH], dense
    rank_ptr,
    order_ptr,
    block_slot_ptr,
    block_start_ptr,
    block_end_ptr,
    token_slots_ptr,  # int32 [T]
    num_tokens,
    num_blocks,
    num_slots,
    num_tiles,  # of BLOCK_N columns that a program computes
    stride_yt,
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
    WIDTH: tl.constexpr,
    IS_JOINT: tl.constexpr,  # gate and up are one module; else they are two
    ACTIVATION: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_N: tl.constexpr,
    RUNS: tl.constexpr,  # of columns that one token is spread in
    ONE_STEP: tl.constexpr,
    NUM_PLANES: tl.constexpr,
    H_ALIGN: tl.constexpr,
    HAS_DORA_SCALE: tl.constexpr,
    HAS_LORA_BIAS: tl.constexpr,
    HAS_BASE_BIAS: tl.constexpr,
    TILE_WIDTH: tl.constexpr,
    PAGE_RANKS: tl.constexpr,
    PAGE_VALUES: tl.constexpr,
):
    """out = activation(gate) * up of y + what its adapter adds, rounded to y's dtype before.

    Grid: [blocks + runs of BLOCK_T tokens, chunks of num_tiles column tiles]. The programs of runs compute tokens
    without an adapter.
    """
    block = tl.program_id(0)
    column_begin = tl.program_id(1) * num_tiles * BLOCK_N
    tiles = tl.minimum(num_tiles, tl.cdiv(WIDTH - column_begin, BLOCK_N))
    dtype: tl.constexpr = y_ptr.dtype.element_ty
    if block < num_blocks:
        # What depends on nothing but the last load is loaded before anything waits for it.
        slot = tl.load(block_slot_ptr + block)
        start = tl.load(block_start_ptr + block)
        end = tl.load(block_end_ptr + block)
        if (slot >= 0) & (slot < num_slots):
            module = tl.full((), 0, tl.int32)
            last = tl.full((), 0 if IS_JOINT else 1, tl.int32)
            table = last.to(tl.int64) * stride_table + slot
            rank = tl.load(rank_ptr + slot)
            first = tl.load(first_ptr + slot)
            scaling = tl.load(scaling_ptr + slot)
            up_rank = tl.load(rank_ptr + table)
            up_first = tl.load(first_ptr + table)
            up_scaling = tl.load(scaling_ptr + table)
            tokens, is_token = tokens_in_rows(order_ptr, start, end, BLOCK_T, RUNS)
            first += tl.cdiv(rank, PAGE_RANKS) * in_tiles  # B lies behind A
            up_first += tl.cdiv(up_rank, PAGE_RANKS) * in_tiles
            out_features = 2 * WIDTH if IS_JOINT else WIDTH
            up_begin = column_begin + (WIDTH if IS_JOINT else 0)
            pages = b_pages(
                page_ids_ptr, first, 0, rank, column_begin, out_features, BLOCK_R, BLOCK_N, TILE_WIDTH, PAGE_RANKS
            )
            up_pages = b_pages(
                page_ids_ptr, up_first, 0, up_rank, up_begin, out_features, BLOCK_R, BLOCK_N, TILE_WIDTH, PAGE_RANKS
            )
            h = h_of(
                h_ptr, tokens, is_token, module, 0, rank, width, stride_hp, stride_hs, stride_ht, BLOCK_T, BLOCK_R,
                NUM_PLANES, H_ALIGN,
            )  # fmt: skip
            up_h = h_of(
                h_ptr, tokens, is_token, last, 0, up_rank, width, stride_hp, stride_hs, stride_ht, BLOCK_T, BLOCK_R,
                NUM_PLANES, H_ALIGN,
            )  # fmt: skip
            y_rows = y_ptr + (tokens * stride_yt)[:, None]
            out_rows = out_ptr + (tokens * WIDTH)[:, None]
            arguments = (
                y_rows, out_rows, tokens, is_token, slot, module, first, rank, scaling, h, pages, last, up_first,
                up_rank, up_scaling, up_h, up_pages, column_begin, up_begin, tiles, out_features, h_ptr, pages_ptr,
                page_ids_ptr, values_ptr, dora_scale_ptr, lora_bias_ptr, base_bias_ptr, width, stride_hp, stride_hs,
                stride_ht, stride_dora_scale, stride_lora_bias,
            )  # fmt: skip
            if RUNS == 1:
                gate_tiles(
                    *arguments, 1, BLOCK_T, dtype, WIDTH, ACTIVATION, BLOCK_T, BLOCK_R, BLOCK_N, ONE_STEP,
                    NUM_PLANES, H_ALIGN, HAS_DORA_SCALE, HAS_LORA_BIAS, HAS_BASE_BIAS, TILE_WIDTH, PAGE_RANKS,
                    PAGE_VALUES,
                )  # fmt: skip
            elif end - start == 1:
                gate_tiles(
                    *arguments, RUNS, 1, dtype, WIDTH, ACTIVATION, BLOCK_T, BLOCK_R, BLOCK_N, ONE_STEP,
                    NUM_PLANES, H_ALIGN, HAS_DORA_SCALE, HAS_LORA_BIAS, HAS_BASE_BIAS, TILE_WIDTH, PAGE_RANKS,
                    PAGE_VALUES,
                )  # fmt: skip
            elif end - start <= BLOCK_T // 2:
                gate_tiles(
                    *arguments, 2, BLOCK_T // 2, dtype, WIDTH, ACTIVATION, BLOCK_T, BLOCK_R, BLOCK_N, ONE_STEP,
                    NUM_PLANES, H_ALIGN, HAS_DORA_SCALE, HAS_LORA_BIAS, HAS_BASE_BIAS, TILE_WIDTH, PAGE_RANKS,
                    PAGE_VALUES,
                )  # fmt: skip
            else:
                gate_tiles(
                    *arguments, 1, BLOCK_T, dtype, WIDTH, ACTIVATION, BLOCK_T, BLOCK_R, BLOCK_N, ONE_STEP,
                    NUM_PLANES, H_ALIGN, HAS_DORA_SCALE, HAS_LORA_BIAS, HAS_BASE_BIAS, TILE_WIDTH, PAGE_RANKS,
                    PAGE_VALUES,
                )  # fmt: skip
    else:
        run = (block - num_blocks) * BLOCK_T + tl.arange(0, BLOCK_T)
        is_token = run < num_tokens
        own = tl.load(token_slots_ptr + run, mask=is_token, other=0)
        is_token = is_token & ((own < 0) | (own >= num_slots))
        if tl.max(is_token.to(tl.int32), 0) > 0:
            y_rows = y_ptr + (run.to(tl.int64) * stride_yt)[:, None]
            out_rows = out_ptr + (run.to(tl.int64) * WIDTH)[:, None]
            for tile in range(0, tiles):
                offs_n = column_begin + tile * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
                gate, up = y_tile(y_rows, offs_n, is_token[:, None], WIDTH)
                active = gated(gate.to(tl.float32), up.to(tl.float32), ACTIVATION)
                is_y = is_token[:, None] & (offs_n < WIDTH)
                tl.store(out_rows + offs_n, active.to(dtype), mask=is_y)


def gated_activation(expansion: Expansion, activation: str) -> torch.Tensor | None:
    """[T, n] of expansion.y [T, 2 n]; None where gate and up cannot be expanded here."""
    y, h, group, segments, epilogue = expansion
    vectors = None if epilogue is None else epilogue.sizes
    launch = _prepare(spec_of(y), spec_of(h), group.sizes, segments.sizes, vectors, activation)
    if launch is None:
        return None
    out = y.new_empty(y.shape[0], y.shape[1] // 2)
    token_slots = y if segments.token_slots is None else segments.token_slots
    launch(
        out,
        y,
        group.rank,
        segments.order,
        segments.block_slot,
        segments.block_start,
        segments.block_end,
        token_slots,
        *expand_pointers(h, group, epilogue),
    )
    return out


@prepares
def _prepare(
    y: TensorSpec,
    h: TensorSpec,
    group: GroupSizes,
    segments: SegmentSizes,
    epilogue: EpilogueSizes | None,
    activation: str,
) -> Prepared | None:
    (num_tokens, num_columns), strides, dtype, _ = y
    check_rows("y", y, segments, group, sum(group.out_features))
    check_h(h, group, segments)
    check_devices(y=y, h=h)
    columns = tile_columns(y, group, segments)
    if columns is None:
        return None
    width = num_columns // 2
    if num_tokens == 0 or width == 0:
        return no_launch
    rows = padded_block_tokens(segments.block_tokens)
    # A step has the loads of two.
    num_tiles = steps_of_program(segments.num_blocks, ceil_div(width, 2 * columns))
    programs = segments.num_blocks + ceil_div(num_tokens, rows)
    is_narrow = dtype.itemsize == 2 and h.shape[3] <= LEAST_EXPAND_RANKS
    has_few_registers = is_narrow and rows == MIN_BLOCK_TOKENS and epilogue is None
    numbers = {
        "num_tokens": num_tokens,
        "num_blocks": segments.num_blocks,
        "num_slots": segments.num_slots,
        "num_tiles": num_tiles,
        "stride_yt": strides[0],
        **expand_numbers(h, group, epilogue),
        "WIDTH": width,
        "IS_JOINT": group.num_modules == 1,
        "ACTIVATION": activation,
        "BLOCK_T": rows,
        "BLOCK_N": columns,
        "RUNS": runs_of(columns, NUM_WARPS, dtype.itemsize),
        "num_warps": NUM_WARPS,
        "num_stages": NUM_STAGES,
        "enable_fp_fusion": False,
        # What a thread computes must fit into them.
        "maxnreg": FEW_REGISTERS if has_few_registers else None,
    }
    return prepare(gate_expand_kernel, (programs, ceil_div(width, num_tiles * columns)), numbers)


def tile_columns(y: TensorSpec, group: GroupSizes, segments: SegmentSizes) -> int | None:
    """Columns of one program for y [T, 2 n]; None where gate and up cannot be expanded here."""
    width, rest = divmod(y.shape[1], 2)
    if rest or group.out_features not in ((width, width), (2 * width,)):
        return None
    return columns_of_tiles(y, group, segments, (0, width), (width, width))
