"""Attention of sequences with one query: long ones are split over programs and joined in a second launch.

Flash-Decoding (2023). What a sequence's output is depends on that sequence alone: split and tile borders follow from
its own lengths, parts are joined in order, and no atomics are used.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import triton
import triton.language as tl

from kernels.buckets import ceil_div
from kernels.paged_attention.device_batch import DeviceBatch
from kernels.paged_attention.launch import DecodeLaunch
from kernels.paged_attention.triton_loop import attend, decode_range, finish


@triton.jit(do_not_specialize=["stride_table", "window"])
def decode_kernel(
    # pointers
    out_ptr,  # [T, Hq, Dv]
    part_ptr,  # float32 [num_parts, Hq, Dv]: weighted values of the first programs, those of several splits
    part_sum_ptr,  # float32 [num_parts, Hq, 2]: highest score, sum of weights
    query_ptr,  # [T, Hq, D]
    key_cache_ptr,
    value_cache_ptr,
    block_tables_ptr,
    query_start_ptr,
    context_lens_ptr,
    programs_ptr,  # int32 [P, 2], as in Splits
    sinks_ptr,  # [Hq]
    slopes_ptr,  # [Hq]
    key_scale_ptr,  # float32 [num_blocks, block_size, Hkv]
    value_scale_ptr,
    # scores
    score_scale,
    softcap,
    window,
    value_scale,  # of the whole cache
    # strides
    stride_ot,
    stride_oh,
    stride_qt,
    stride_qh,
    stride_qd,
    stride_kb,
    stride_kp,
    stride_kh,
    stride_vb,
    stride_vp,
    stride_vh,
    stride_sb,
    stride_sp,
    stride_table,
    # sizes and options
    GROUP: tl.constexpr,  # query heads of one key head
    HEADS: tl.constexpr,  # query heads of one key head in one tile, at most BLOCK_M
    HEAD_TILES: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SPLIT_KEYS: tl.constexpr,
    SPLITS: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    HAS_SLOPES: tl.constexpr,
    HAS_TOKEN_SCALES: tl.constexpr,
    SPARSE_BLOCK: tl.constexpr,
    LOCAL_BLOCKS: tl.constexpr,
    VERTICAL_STRIDE: tl.constexpr,
    HEAD_STEP: tl.constexpr,
):
    """One split of one sequence with one query, one tile of heads. Grid: (P, Hkv * HEAD_TILES).

    A sequence of one split is finished here; `combine_kernel` joins the others.
    """
    program = tl.program_id(0)
    kv_head = tl.program_id(1) // HEAD_TILES
    sequence = tl.load(programs_ptr + program * 2)
    if sequence < 0:
        return
    split = tl.load(programs_ptr + program * 2 + 1)
    context_len = tl.load(context_lens_ptr + sequence)
    # Heads of one tile see the same blocks.
    first_head = kv_head * GROUP + tl.program_id(1) % HEAD_TILES * HEADS
    first_key, begin, end, first_vertical, num_vertical, first_local, split_keys, num_splits = decode_range(
        context_len, window, first_head, kv_head, HAS_WINDOW, BLOCK_N, SPLIT_KEYS, SPLITS, SPARSE_BLOCK, LOCAL_BLOCKS,
        VERTICAL_STRIDE, HEAD_STEP,
    )  # fmt: skip
    if split < num_splits:
        token = tl.load(query_start_ptr + sequence).to(tl.int64)
        rows = tl.arange(0, BLOCK_M)
        heads = first_head + rows
        is_row = (rows < HEADS) & (heads < (kv_head + 1) * GROUP)
        offs_d = tl.arange(0, BLOCK_D)
        query = tl.load(
            query_ptr + token * stride_qt + heads.to(tl.int64)[:, None] * stride_qh + offs_d[None, :] * stride_qd,
            mask=is_row[:, None] & (offs_d < KEY_DIM)[None, :],
            other=0.0,
        )
        slope = tl.zeros([BLOCK_M], tl.float32)
        if HAS_SLOPES:
            slope = tl.load(slopes_ptr + heads, mask=is_row, other=0.0).to(tl.float32) * 1.4426950408889634
        start = begin + split * split_keys
        acc, highest, total = attend(
            tl.zeros([BLOCK_M, BLOCK_DV], tl.float32), tl.full([BLOCK_M], float("-inf"), tl.float32),
            tl.zeros([BLOCK_M], tl.float32), query, tl.zeros([BLOCK_M], tl.int32) + (context_len - 1), slope,
            key_cache_ptr + kv_head.to(tl.int64) * stride_kh, value_cache_ptr + kv_head.to(tl.int64) * stride_vh,
            key_scale_ptr + kv_head, value_scale_ptr + kv_head,
            block_tables_ptr + sequence.to(tl.int64) * stride_table, start, tl.minimum(start + split_keys, end),
            first_key, first_vertical, num_vertical, first_local, score_scale=score_scale, softcap=softcap,
            window=window, stride_kb=stride_kb, stride_kp=stride_kp, stride_vb=stride_vb, stride_vp=stride_vp,
            stride_sb=stride_sb, stride_sp=stride_sp, KEY_DIM=KEY_DIM, VALUE_DIM=VALUE_DIM, BLOCK_D=BLOCK_D,
            BLOCK_DV=BLOCK_DV, BLOCK_SIZE=BLOCK_SIZE, BLOCK_N=BLOCK_N, IS_CAUSAL=True, HAS_WINDOW=HAS_WINDOW,
            HAS_SOFTCAP=HAS_SOFTCAP, HAS_SLOPES=HAS_SLOPES, HAS_TOKEN_SCALES=HAS_TOKEN_SCALES,
            SPARSE_BLOCK=SPARSE_BLOCK, LOCAL_BLOCKS=LOCAL_BLOCKS, VERTICAL_STRIDE=VERTICAL_STRIDE, IS_MASKED=True,
        )  # fmt: skip
        offs_dv = tl.arange(0, BLOCK_DV)
        is_stored = is_row[:, None] & (offs_dv < VALUE_DIM)[None, :]
        if num_splits == 1:
            mixed = finish(acc, highest, total, sinks_ptr, heads, is_row, value_scale, HAS_SINKS)
            row_ptrs = out_ptr + token * stride_ot + heads.to(tl.int64)[:, None] * stride_oh
            tl.store(row_ptrs + offs_dv[None, :], mixed.to(out_ptr.dtype.element_ty), mask=is_stored)
        else:
            num_heads = tl.num_programs(1) // HEAD_TILES * GROUP
            part = program.to(tl.int64) * num_heads + heads
            tl.store(part_ptr + part[:, None] * VALUE_DIM + offs_dv[None, :], acc, mask=is_stored)
            tl.store(part_sum_ptr + part * 2, highest, mask=is_row)
            tl.store(part_sum_ptr + part * 2 + 1, total, mask=is_row)


@triton.jit(do_not_specialize=["window"])
def combine_kernel(
    # pointers, as in decode_kernel
    out_ptr,
    part_ptr,
    part_sum_ptr,
    query_start_ptr,
    context_lens_ptr,
    joins_ptr,  # int32 [num_joins, 2], as in Splits
    sinks_ptr,
    # strides
    stride_ot,
    stride_oh,
    window,
    value_scale,
    # sizes and options
    GROUP: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SPLIT_KEYS: tl.constexpr,
    SPLITS: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    SPARSE_BLOCK: tl.constexpr,
    LOCAL_BLOCKS: tl.constexpr,
    VERTICAL_STRIDE: tl.constexpr,
    HEAD_STEP: tl.constexpr,
):
    """Joins the splits of one sequence and head, in their order. Grid: (num_joins, Hq)."""
    join = tl.program_id(0)
    head = tl.program_id(1)
    sequence = tl.load(joins_ptr + join * 2)
    if sequence < 0:
        return
    context_len = tl.load(context_lens_ptr + sequence)
    _, _, _, _, _, _, _, num_splits = decode_range(
        context_len, window, head, head // GROUP, HAS_WINDOW, BLOCK_N, SPLIT_KEYS, SPLITS, SPARSE_BLOCK, LOCAL_BLOCKS,
        VERTICAL_STRIDE, HEAD_STEP,
    )  # fmt: skip
    if num_splits > 1:
        offs_dv = tl.arange(0, BLOCK_DV)
        acc = tl.zeros([1, BLOCK_DV], tl.float32)
        highest = tl.full([1], float("-inf"), tl.float32)
        total = tl.zeros([1], tl.float32)
        first_part = tl.load(joins_ptr + join * 2 + 1).to(tl.int64)
        for split in range(0, num_splits):
            part = (first_part + split) * tl.num_programs(1) + head
            part_highest = tl.load(part_sum_ptr + part * 2)
            part_total = tl.load(part_sum_ptr + part * 2 + 1)
            values = tl.load(part_ptr + part * VALUE_DIM + offs_dv, mask=offs_dv < VALUE_DIM, other=0.0)
            # Every split holds a visible key: its highest score is finite.
            new_highest = tl.maximum(highest, part_highest)
            decay = tl.exp2(highest - new_highest)
            part_decay = tl.exp2(part_highest - new_highest)
            acc = acc * decay[:, None] + values[None, :] * part_decay[:, None]
            total = total * decay + part_total * part_decay
            highest = new_highest
        heads = head + tl.zeros([1], tl.int32)
        mixed = finish(acc, highest, total, sinks_ptr, heads, heads >= 0, value_scale, HAS_SINKS)
        token = tl.load(query_start_ptr + sequence).to(tl.int64)
        row_ptr = out_ptr + token * stride_ot + head.to(tl.int64) * stride_oh
        is_stored = (offs_dv < VALUE_DIM)[None, :]
        tl.store(row_ptr + offs_dv[None, :], mixed.to(out_ptr.dtype.element_ty), mask=is_stored)


def run_decode(
    output: torch.Tensor,
    batch: DeviceBatch,
    arguments: Mapping[str, Any],
    launch: DecodeLaunch,
) -> None:
    """Attend, then join what was split.

    The parts take 4 * Hq * (Dv + 2) bytes for each program where a sequence is split, else nothing.
    arguments: what decode and prefill share, by name.
    """
    # A window's first tile may begin before it.
    most_keys = arguments["window"] + launch.block_n - 1 if arguments["HAS_WINDOW"] else None
    work = batch.splits(launch.split_keys, launch.max_splits, most_keys)
    if len(work.programs) == 0:
        return
    num_heads, value_dim = output.shape[1:]
    group = arguments["GROUP"]
    heads = 1 if arguments["HEAD_STEP"] > 0 else min(group, launch.block_m)
    head_tiles = ceil_div(group, heads)
    every = {
        **arguments,
        "part_ptr": torch.empty(work.num_parts, num_heads, value_dim, dtype=torch.float32, device=output.device),
        "part_sum_ptr": torch.empty(work.num_parts, num_heads, 2, dtype=torch.float32, device=output.device),
        "BLOCK_N": launch.block_n,
        "SPLIT_KEYS": launch.split_keys,
        "SPLITS": launch.max_splits,
    }
    decode_kernel[(len(work.programs), num_heads // group * head_tiles)](
        **every,
        programs_ptr=work.programs,
        HEADS=heads,
        HEAD_TILES=head_tiles,
        BLOCK_M=launch.block_m,
        num_warps=launch.num_warps,
        num_stages=launch.num_stages,
    )
    if len(work.joins) > 0:
        combine_kernel[(len(work.joins), num_heads)](
            **{name: every[name] for name in combine_kernel.arg_names if name in every},
            joins_ptr=work.joins,
            num_warps=1 if arguments["BLOCK_DV"] <= 128 else 2,
        )
