"""Attention of sequences with one query: long ones are split over programs, and the last one to end joins them.

Flash-Decoding (2023) in one launch of as many programs as the device holds at once: each takes one entry of the
device's work list after another. What a sequence's output is depends on that sequence alone: split and tile borders
follow from its own lengths, and parts are joined in order. The one atomic operation counts the parts that are ready.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import triton
import triton.language as tl

from kernels.buckets import ceil_div
from kernels.devices import num_multiprocessors
from kernels.paged_attention.device_batch import DeviceBatch, Splitting
from kernels.paged_attention.launch import DecodeLaunch
from kernels.paged_attention.triton_loop import attend, decode_range, finish
from kernels.paged_attention.triton_work import write_list
from kernels.triton_launch import kernel


@triton.jit
def _join(
    part_ptr,
    part_sum_ptr,
    first_part,
    num_splits,
    num_heads,
    heads,
    is_row,
    VALUE_DIM: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    BLOCK_M: tl.constexpr,
):
    """The softmax over all splits of a tile of heads, in their order: weighted values, highest score, sum of weights.

    Other programs wrote the parts: they are read from where all multiprocessors see them.
    """
    offs_dv = tl.arange(0, BLOCK_DV)
    is_value = is_row[:, None] & (offs_dv < VALUE_DIM)[None, :]
    acc = tl.zeros([BLOCK_M, BLOCK_DV], tl.float32)
    highest = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    for split in range(0, num_splits):
        part = (first_part + split) * num_heads + heads
        part_highest = tl.load(part_sum_ptr + part * 2, mask=is_row, other=0.0, cache_modifier=".cg")
        part_total = tl.load(part_sum_ptr + part * 2 + 1, mask=is_row, other=0.0, cache_modifier=".cg")
        value_ptrs = part_ptr + part[:, None] * VALUE_DIM + offs_dv[None, :]
        values = tl.load(value_ptrs, mask=is_value, other=0.0, cache_modifier=".cg")
        # Every split holds a visible key: its highest score is finite.
        new_highest = tl.maximum(highest, part_highest)
        decay = tl.exp2(highest - new_highest)
        part_decay = tl.exp2(part_highest - new_highest)
        acc = acc * decay[:, None] + values * part_decay[:, None]
        total = total * decay + part_total * part_decay
        highest = new_highest
    return acc, highest, total


@kernel(do_not_specialize=["stride_table", "window"])
def decode_kernel(
    # pointers
    out_ptr,  # [T, Hq, Dv]
    part_ptr,  # float32 [num_parts, Hq, Dv]: weighted values of the first programs, those of several splits
    part_sum_ptr,  # float32 [num_parts, Hq, 2]: highest score, sum of weights
    query_ptr,  # [T, Hq, D]
    key_cache_ptr,
    value_cache_ptr,
    block_tables_ptr,
    table_rows_ptr,
    query_start_ptr,
    context_lens_ptr,
    programs_ptr,  # as in Work, and the two below
    num_programs_ptr,
    num_done_ptr,
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
    TILES: tl.constexpr,  # of heads: key heads * HEAD_TILES
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
    """Splits of sequences with one query, for one tile of heads each. Grid: (as many as the device holds,).

    Entry e of the list and tile t of heads are item e * tiles + t; program p takes the items p, p + programs and so on.
    """
    num_items = tl.load(num_programs_ptr) * TILES
    for item in tl.range(tl.program_id(0), num_items, tl.num_programs(0), disable_licm=True):
        program = item // TILES
        tile = item % TILES
        kv_head = tile // HEAD_TILES
        sequence = tl.load(programs_ptr + program * 2)
        split = tl.load(programs_ptr + program * 2 + 1)
        context_len = tl.load(context_lens_ptr + sequence)
        # Heads of one tile see the same blocks.
        first_head = kv_head * GROUP + tile % HEAD_TILES * HEADS
        first_key, begin, end, first_vertical, num_vertical, first_local, split_keys, num_splits = decode_range(
            context_len, window, first_head, kv_head, HAS_WINDOW, BLOCK_N, SPLIT_KEYS, SPLITS, SPARSE_BLOCK,
            LOCAL_BLOCKS, VERTICAL_STRIDE, HEAD_STEP,
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
                block_tables_ptr + tl.load(table_rows_ptr + sequence).to(tl.int64) * stride_table, start,
                tl.minimum(start + split_keys, end), first_key, first_vertical, num_vertical, first_local,
                score_scale=score_scale, softcap=softcap, window=window, stride_kb=stride_kb, stride_kp=stride_kp,
                stride_vb=stride_vb, stride_vp=stride_vp, stride_sb=stride_sb, stride_sp=stride_sp, KEY_DIM=KEY_DIM,
                VALUE_DIM=VALUE_DIM, BLOCK_D=BLOCK_D, BLOCK_DV=BLOCK_DV, BLOCK_SIZE=BLOCK_SIZE, BLOCK_N=BLOCK_N,
                IS_CAUSAL=True, HAS_WINDOW=HAS_WINDOW, HAS_SOFTCAP=HAS_SOFTCAP, HAS_SLOPES=HAS_SLOPES,
                HAS_TOKEN_SCALES=HAS_TOKEN_SCALES, SPARSE_BLOCK=SPARSE_BLOCK, LOCAL_BLOCKS=LOCAL_BLOCKS,
                VERTICAL_STRIDE=VERTICAL_STRIDE, IS_MASKED=True,
            )  # fmt: skip
            offs_dv = tl.arange(0, BLOCK_DV)
            is_stored = is_row[:, None] & (offs_dv < VALUE_DIM)[None, :]
            is_last = num_splits == 1
            if num_splits > 1:
                num_heads = TILES // HEAD_TILES * GROUP
                part = program.to(tl.int64) * num_heads + heads
                tl.store(part_ptr + part[:, None] * VALUE_DIM + offs_dv[None, :], acc, mask=is_stored)
                tl.store(part_sum_ptr + part * 2, highest, mask=is_row)
                tl.store(part_sum_ptr + part * 2 + 1, total, mask=is_row)
                # All threads have stored their values before one of them says so to the other programs.
                tl.debug_barrier()
                done_ptr = num_done_ptr + sequence * TILES + tile
                is_last = tl.atomic_add(done_ptr, 1, sem="acq_rel") == num_splits - 1
                if is_last:
                    acc, highest, total = _join(
                        part_ptr, part_sum_ptr, (program - split).to(tl.int64), num_splits, num_heads, heads, is_row,
                        VALUE_DIM, BLOCK_DV, BLOCK_M,
                    )  # fmt: skip
                    tl.store(done_ptr, 0)
            if is_last:
                mixed = finish(acc, highest, total, sinks_ptr, heads, is_row, value_scale, HAS_SINKS)
                row_ptrs = out_ptr + token * stride_ot + heads.to(tl.int64)[:, None] * stride_oh
                tl.store(row_ptrs + offs_dv[None, :], mixed.to(out_ptr.dtype.element_ty), mask=is_stored)


def run_decode(
    output: torch.Tensor,
    batch: DeviceBatch,
    arguments: Mapping[str, Any],
    launch: DecodeLaunch,
) -> None:
    """Attend, and join what was split.

    The parts take 4 * Hq * (Dv + 2) bytes for each program where a sequence is split, else nothing.
    arguments: what decode and prefill share, by name.
    """
    num_heads, value_dim = output.shape[1:]
    group = arguments["GROUP"]
    heads = 1 if arguments["HEAD_STEP"] > 0 else min(group, launch.block_m)
    head_tiles = ceil_div(group, heads)
    tiles = num_heads // group * head_tiles
    window = arguments["window"] if arguments["HAS_WINDOW"] else None
    splitting = Splitting(launch.split_keys, launch.max_splits, tiles, launch.block_n, window)
    work = batch.work(splitting, lambda work: write_list(work, batch, splitting))
    if work is None:
        return
    num_programs = min(num_multiprocessors(output) * launch.programs, len(work.programs) * tiles)
    decode_kernel[(num_programs,)](
        **arguments,
        part_ptr=output.new_empty(work.num_parts, num_heads, value_dim, dtype=torch.float32),
        part_sum_ptr=output.new_empty(work.num_parts, num_heads, 2, dtype=torch.float32),
        programs_ptr=work.programs,
        num_programs_ptr=work.num_programs,
        num_done_ptr=work.num_done,
        TILES=tiles,
        BLOCK_N=launch.block_n,
        SPLIT_KEYS=launch.split_keys,
        SPLITS=launch.max_splits,
        HEADS=heads,
        HEAD_TILES=head_tiles,
        BLOCK_M=launch.block_m,
        num_warps=launch.num_warps,
        num_stages=launch.num_stages,
    )
