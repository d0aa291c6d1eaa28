"""Expand on pages in Triton, for any mix of ranks and widths in one launch, with LoRA bias and DoRA scale.

`expanded` is what the gate calls too, which reads y next and expands on the way, in place of a launch of its own (see
kernels.lora.expansion). Both are compiled without fused multiply and add: a compiler could fuse in one kernel and not
in the other, and bits would depend on which of them is launched.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from kernels.buckets import ceil_div
from kernels.devices import device_name
from kernels.lora.expansion import Expansion
from kernels.lora.launch import ExpandLaunch, Sizes, expand_launch
from kernels.lora.layout import H_ALIGN, PAGE_RANKS, Epilogue, ModuleGroup
from kernels.lora.segments import AdapterSegments, padded_block_tokens
from kernels.lora.triton_pages import block_tokens, load_vector, page_offsets, pages_at
from kernels.triton_launch import kernel

# Ranks of one step of a program at most, and at least: of an instruction, which sums them in their order. Steps of
# either size have the same bits, for ranks that do not exist add zeros. On an H100 the smaller one takes a fifth less.
EXPAND_RANKS, LEAST_EXPAND_RANKS = 32, 16
# How every kernel is compiled that expands.
AS_EXPAND = {"num_stages": 1, "enable_fp_fusion": False}


@triton.jit
def columns_of(module, OUT_FEATURES: tl.constexpr, NUM_MODULES: tl.constexpr):
    """(first column of the module in y, number of its columns): modules lie side by side."""
    begin = 0
    out_features = OUT_FEATURES[0]
    for other in tl.static_range(1, NUM_MODULES):
        begin += tl.where(module >= other, OUT_FEATURES[other - 1], 0)
        out_features = tl.where(module == other, OUT_FEATURES[other], out_features)
    return begin, out_features


@triton.jit
def expanded(
    base,  # float32 [T, N]: what y has; zeros if not ADD_INPUTS
    tokens,  # int64 [T]
    is_token,
    slot,
    module,
    rank,  # of the slot at the module, at least 1
    column,  # the first of BLOCK_N columns of the module, a multiple of BLOCK_N
    out_features,
    y_columns,  # [N]
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
    BLOCK_T: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_N: tl.constexpr,
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
    """What y gets in some columns of one module for tokens of one slot, float32 [T, N] before it is rounded.

    The same bits in every kernel that calls it: neither BLOCK_T nor BLOCK_N nor a token's place among them decides in
    which order a value is summed.
    """
    table = module.to(tl.int64) * stride_table + slot
    offs_n = column + tl.arange(0, BLOCK_N)
    is_column = offs_n < out_features
    first = tl.load(first_ptr + table) + tl.cdiv(rank, PAGE_RANKS) * in_tiles  # B lies behind A
    # Runs of H_ALIGN ranks are read at once, also those past the slot's rank, which are then dropped.
    room = width // H_ALIGN * H_ALIGN
    h_rows = h_ptr + module.to(tl.int64) * (stride_hs // H_ALIGN * H_ALIGN)
    h_rows += tokens * (stride_ht // H_ALIGN * H_ALIGN)
    acc = tl.zeros((BLOCK_T, BLOCK_N), tl.float32)
    for rank_begin in range(0, rank, BLOCK_R):
        offs_r = rank_begin + tl.arange(0, BLOCK_R)
        is_rank = offs_r < rank
        is_h = is_token[:, None] & (offs_r < room)[None, :]
        h = tl.zeros((BLOCK_T, BLOCK_R), tl.float32)
        for plane in tl.static_range(NUM_PLANES):
            h_plane = h_rows + tl.cast(plane, tl.int64) * (stride_hp // H_ALIGN * H_ALIGN)
            h += tl.load(h_plane[:, None] + offs_r[None, :], mask=is_h, other=0.0)
        h = tl.where(is_rank[None, :], h, 0.0)
        pages = pages_at(
            page_ids_ptr, first, tl.cdiv(out_features, TILE_WIDTH), offs_r, is_rank, column, out_features,
            BLOCK_N, TILE_WIDTH, PAGE_RANKS,
        )  # fmt: skip
        offsets, is_inside = page_offsets(pages, offs_r, is_rank, column, out_features, BLOCK_N, TILE_WIDTH, PAGE_RANKS)
        b = tl.load(pages_ptr + offsets, mask=is_inside, other=0.0)
        acc = tl.dot(h.to(b.dtype), b, acc, input_precision="ieee")
    # A launch cannot raise: a slot of more ranks than h has turns its rows to NaN.
    acc = tl.where(rank > width, float("nan"), acc)
    if HAS_LORA_BIAS:
        start = tl.load(lora_bias_ptr + module.to(tl.int64) * stride_lora_bias + slot)
        bias = load_vector(values_ptr, page_ids_ptr, start, offs_n, is_column, 0.0, PAGE_VALUES)
        acc += bias[None, :]
    acc *= tl.load(scaling_ptr + table)
    if ADD_INPUTS:
        acc += base
    if HAS_DORA_SCALE:
        start = tl.load(dora_scale_ptr + module.to(tl.int64) * stride_dora_scale + slot)
        dora_scale = load_vector(values_ptr, page_ids_ptr, start, offs_n, is_column, 1.0, PAGE_VALUES)[None, :]
        if HAS_BASE_BIAS:
            own = tl.load(base_bias_ptr + y_columns, mask=is_column, other=0.0)[None, :]
            # A DoRA scale of 1 changes no bit.
            acc = tl.where(dora_scale == 1.0, acc, dora_scale * (acc - own) + own)
        else:
            acc *= dora_scale
    return acc


@kernel(do_not_specialize=["num_slots", "width", "stride_hp", "stride_hs"])
def expand_kernel(
    y_ptr,
    rank_ptr,
    order_ptr,
    block_slot_ptr,
    block_start_ptr,
    block_end_ptr,
    num_slots,
    stride_yt,
    stride_yn,
    # as `expanded` takes them
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
    Grid: [blocks, column tiles, modules].
    """
    block = tl.program_id(0)
    module = tl.program_id(2)
    module_begin, out_features = columns_of(module, OUT_FEATURES, NUM_MODULES)
    column = tl.program_id(1) * BLOCK_N
    slot = tl.load(block_slot_ptr + block)
    if (slot >= 0) & (slot < num_slots) & (column < out_features):
        rank = tl.load(rank_ptr + module.to(tl.int64) * stride_table + slot)
        if rank > 0:
            tokens, is_token = block_tokens(order_ptr, block_start_ptr, block_end_ptr, block, BLOCK_T)
            is_y = is_token[:, None] & (column + tl.arange(0, BLOCK_N) < out_features)[None, :]
            y_columns = tl.multiple_of(module_begin + column, ALIGN) + tl.arange(0, BLOCK_N)
            y_at = y_ptr + (tokens * stride_yt)[:, None] + (y_columns.to(tl.int64) * stride_yn)[None, :]
            base = tl.zeros((BLOCK_T, BLOCK_N), tl.float32)
            if ADD_INPUTS:  # loaded before the products, used after them
                base = tl.load(y_at, mask=is_y, other=0.0).to(tl.float32)
            total = expanded(
                base, tokens, is_token, slot, module, rank, column, out_features, y_columns, h_ptr, pages_ptr,
                page_ids_ptr, first_ptr, scaling_ptr, values_ptr, dora_scale_ptr, lora_bias_ptr, base_bias_ptr,
                in_tiles, width, stride_hp, stride_hs, stride_ht, stride_table, stride_dora_scale, stride_lora_bias,
                BLOCK_T, BLOCK_R, BLOCK_N, NUM_PLANES, H_ALIGN, ADD_INPUTS, HAS_DORA_SCALE, HAS_LORA_BIAS,
                HAS_BASE_BIAS, TILE_WIDTH, PAGE_RANKS, PAGE_VALUES,
            )  # fmt: skip
            tl.store(y_at, total.to(y_ptr.dtype.element_ty), mask=is_y)


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
        **AS_EXPAND,
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
    grid = (segments.num_blocks, ceil_div(max(group.out_features), launch.out_columns), group.num_modules)
    expand_kernel[grid](
        y_ptr=y,
        order_ptr=segments.order,
        block_slot_ptr=segments.block_slot,
        block_start_ptr=segments.block_start,
        block_end_ptr=segments.block_end,
        num_slots=segments.num_slots,
        stride_yt=y.stride(0),
        stride_yn=y.stride(1),
        **expand_arguments(h, group, epilogue),
        OUT_FEATURES=group.out_features,
        NUM_MODULES=group.num_modules,
        ALIGN=16 if all(features % 16 == 0 for features in group.out_features) else 1,
        BLOCK_T=padded_block_tokens(segments.block_tokens),
        BLOCK_N=launch.out_columns,
        ADD_INPUTS=add_inputs,
        num_warps=launch.num_warps,
        **AS_EXPAND,
    )
