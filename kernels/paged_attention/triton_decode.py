"""Attention of sequences with one query: long ones are split over programs, and the last one to end joins them.

Flash-Decoding (2023) in one launch of as many programs as the device holds at once: each takes one entry of the
device's work list after another. What a sequence's output is depends on that sequence alone: split and tile borders
follow from its own lengths, and parts are joined in order. The one atomic operation counts the parts that are ready.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from kernels.buckets import ceil_div, round_up
from kernels.devices import num_multiprocessors
from kernels.paged_attention.device_batch import DeviceBatch, Splitting
from kernels.paged_attention.launch import DecodeLaunch
from kernels.paged_attention.triton_loop import attend, decode_range, finish, fold
from kernels.paged_attention.triton_work import write_list
from kernels.triton_launch import Prepared, kernel, prepare, prepares

JOINED = 2  # splits that the last program to end loads at once


@triton.jit
def _join(
    part_ptr,
    part_sum_ptr,
    first_slot,
    num_splits,
    slots,  # of each split
    units,  # of each split: 1 if they are computed whole
    last_units,  # of the last one
    num_heads,
    heads,
    is_row,
    UNITS: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    ROWS: tl.constexpr,
    JOINED: tl.constexpr,
):
    """The softmax over all splits of a tile of heads: weighted values [ROWS, Dv], highest score, sum of weights.

    Units are folded into their splits as by a program that computes a whole split. The parts of JOINED splits are on
    their way at once. Other programs wrote them: they are read from where all multiprocessors see them.
    """
    offs_dv = tl.arange(0, BLOCK_DV)
    is_value = is_row[:, None] & (offs_dv < VALUE_DIM)[None, :]
    acc = tl.zeros([ROWS, BLOCK_DV], tl.float32)
    highest = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    for first in range(0, num_splits, JOINED):
        for joined in tl.static_range(JOINED):
            split = first + joined
            units_of = tl.where(split < num_splits - 1, units, tl.where(split < num_splits, last_units, 0))
            split_acc = tl.zeros([ROWS, BLOCK_DV], tl.float32)
            split_highest = tl.full([ROWS], float("-inf"), tl.float32)
            split_total = tl.zeros([ROWS], tl.float32)
            for unit in tl.static_range(UNITS):
                is_there = unit < units_of
                part = (first_slot + split * slots + unit).to(tl.int64) * num_heads + heads
                sum_ptrs = part_sum_ptr + part * 2
                part_highest = tl.load(sum_ptrs, mask=is_row & is_there, other=float("-inf"), cache_modifier=".cg")
                part_total = tl.load(sum_ptrs + 1, mask=is_row & is_there, other=0.0, cache_modifier=".cg")
                value_ptrs = part_ptr + part[:, None] * VALUE_DIM + offs_dv[None, :]
                values = tl.load(value_ptrs, mask=is_value & is_there, other=0.0, cache_modifier=".cg")
                split_acc, split_highest, split_total = fold(
                    split_acc, split_highest, split_total, values, part_highest, part_total
                )
            acc, highest, total = fold(acc, highest, total, split_acc, split_highest, split_total)
    return acc, highest, total


@triton.jit
def _store_output(
    out_ptr,
    acc,
    highest,
    total,
    sinks_ptr,
    heads,
    is_row,
    value_scale,
    stride_oh,
    HAS_SINKS: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK_DV: tl.constexpr,
):
    """The softmax of a tile of heads, done, as rows of the output."""
    mixed = finish(acc, highest, total, sinks_ptr, heads, is_row, value_scale, HAS_SINKS)
    offs_dv = tl.arange(0, BLOCK_DV)
    tl.store(
        out_ptr + heads.to(tl.int64)[:, None] * stride_oh + offs_dv[None, :],
        mixed.to(out_ptr.dtype.element_ty),
        mask=is_row[:, None] & (offs_dv < VALUE_DIM)[None, :],
    )


@kernel(do_not_specialize=["stride_table", "window"])
def decode_kernel(
    # pointers
    out_ptr,  # [T, Hq, Dv]
    part_ptr,  # float32 [num_parts, Hq, Dv]: weighted values of the first entries, those of several splits, or of units
    part_sum_ptr,  # float32 [num_parts, Hq, 2]: highest score, sum of weights
    query_ptr,  # [T, Hq, D]
    key_cache_ptr,
    value_cache_ptr,
    block_tables_ptr,
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
    UNITS: tl.constexpr,
    ROWS: tl.constexpr,  # at least HEADS
    JOINED: tl.constexpr,  # splits at a time
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
    """Splits of sequences with one query for one tile of heads each, or units of splits. Grid: (as many as the device
    holds,).

    Where the programs are enough for all units of all splits, an item is a unit, else a whole split. Items are numbered
    with the tiles of heads innermost; program p takes the items p, p + programs and so on.
    """
    num_entries = tl.load(num_programs_ptr)
    has_units = num_entries * (UNITS * TILES) <= tl.num_programs(0)
    slots = tl.where(has_units, UNITS, 1)  # for parts of one entry
    num_items = num_entries * slots * TILES
    for item in tl.range(tl.program_id(0), num_items, tl.num_programs(0), disable_licm=True):
        tile = item % TILES
        kv_head = tile // HEAD_TILES
        slot = item // TILES
        entry = tl.where(has_units, slot // UNITS, slot)
        unit = tl.where(has_units, slot % UNITS, 0)
        token = tl.load(programs_ptr + entry * 4)
        split = tl.load(programs_ptr + entry * 4 + 1)
        context_len = tl.load(programs_ptr + entry * 4 + 2)
        table_row = tl.load(programs_ptr + entry * 4 + 3)
        # Heads of one tile see the same blocks.
        first_head = kv_head * GROUP + tile % HEAD_TILES * HEADS
        (
            first_key, begin, end, first_vertical, num_vertical, first_local, split_keys, num_splits, unit_keys,
        ) = decode_range(
            context_len, window, first_head, kv_head, HAS_WINDOW, BLOCK_N, SPLIT_KEYS, SPLITS, UNITS, SPARSE_BLOCK,
            LOCAL_BLOCKS, VERTICAL_STRIDE, HEAD_STEP,
        )  # fmt: skip
        split_end = tl.minimum(begin + (split + 1) * split_keys, end)
        start = begin + split * split_keys + unit * unit_keys
        stop = tl.where(has_units, tl.minimum(start + unit_keys, split_end), split_end)
        if start < stop:
            rows = tl.arange(0, BLOCK_M)
            heads = first_head + rows
            is_row = (rows < HEADS) & (heads < (kv_head + 1) * GROUP)
            offs_d = tl.arange(0, BLOCK_D)
            query = tl.load(
                query_ptr
                + token.to(tl.int64) * stride_qt
                + heads.to(tl.int64)[:, None] * stride_qh
                + offs_d[None, :] * stride_qd,
                mask=is_row[:, None] & (offs_d < KEY_DIM)[None, :],
                other=0.0,
            )
            slope = tl.zeros([BLOCK_M], tl.float32)
            if HAS_SLOPES:
                slope = tl.load(slopes_ptr + heads, mask=is_row, other=0.0).to(tl.float32) * 1.4426950408889634
            acc, highest, total = attend(
                tl.zeros([BLOCK_M, BLOCK_DV], tl.float32), tl.full([BLOCK_M], float("-inf"), tl.float32),
                tl.zeros([BLOCK_M], tl.float32), query, tl.zeros([BLOCK_M], tl.int32) + (context_len - 1), slope,
                key_cache_ptr + kv_head.to(tl.int64) * stride_kh, value_cache_ptr + kv_head.to(tl.int64) * stride_vh,
                key_scale_ptr + kv_head, value_scale_ptr + kv_head,
                block_tables_ptr + table_row.to(tl.int64) * stride_table, start, stop, first_key, first_vertical,
                num_vertical, first_local, unit_keys, score_scale=score_scale, softcap=softcap, window=window,
                stride_kb=stride_kb, stride_kp=stride_kp, stride_vb=stride_vb, stride_vp=stride_vp,
                stride_sb=stride_sb, stride_sp=stride_sp, KEY_DIM=KEY_DIM, VALUE_DIM=VALUE_DIM, BLOCK_D=BLOCK_D,
                BLOCK_DV=BLOCK_DV, BLOCK_SIZE=BLOCK_SIZE, BLOCK_N=BLOCK_N, IS_CAUSAL=True, HAS_WINDOW=HAS_WINDOW,
                HAS_SOFTCAP=HAS_SOFTCAP, HAS_SLOPES=HAS_SLOPES, HAS_TOKEN_SCALES=HAS_TOKEN_SCALES,
                SPARSE_BLOCK=SPARSE_BLOCK, LOCAL_BLOCKS=LOCAL_BLOCKS, VERTICAL_STRIDE=VERTICAL_STRIDE, IS_MASKED=True,
                HAS_UNITS=UNITS > 1,
            )  # fmt: skip
            units = tl.where(has_units, tl.cdiv(split_keys, unit_keys), 1)
            last_units = tl.where(has_units, tl.cdiv(end - begin - (num_splits - 1) * split_keys, unit_keys), 1)
            num_joined = (num_splits - 1) * units + last_units
            if num_joined == 1:
                _store_output(
                    out_ptr + token.to(tl.int64) * stride_ot, acc, highest, total, sinks_ptr, heads, is_row,
                    value_scale, stride_oh, HAS_SINKS, VALUE_DIM, BLOCK_DV,
                )  # fmt: skip
            else:
                num_heads = TILES // HEAD_TILES * GROUP
                part = slot.to(tl.int64) * num_heads + heads
                offs_dv = tl.arange(0, BLOCK_DV)
                part_ptrs = part_ptr + part[:, None] * VALUE_DIM + offs_dv[None, :]
                tl.store(part_ptrs, acc, mask=is_row[:, None] & (offs_dv < VALUE_DIM)[None, :])
                tl.store(part_sum_ptr + part * 2, highest, mask=is_row)
                tl.store(part_sum_ptr + part * 2 + 1, total, mask=is_row)
                # All threads have stored their values before one of them says so to the other programs.
                tl.debug_barrier()
                done_ptr = num_done_ptr + token * TILES + tile
                if tl.atomic_add(done_ptr, 1, sem="acq_rel") == num_joined - 1:
                    joined_rows = tl.arange(0, ROWS)
                    joined_heads = first_head + joined_rows
                    is_joined = (joined_rows < HEADS) & (joined_heads < (kv_head + 1) * GROUP)
                    joined_acc, joined_highest, joined_total = _join(
                        part_ptr, part_sum_ptr, (entry - split) * slots, num_splits, slots, units, last_units,
                        num_heads, joined_heads, is_joined, UNITS, VALUE_DIM, BLOCK_DV, ROWS, JOINED,
                    )  # fmt: skip
                    tl.store(done_ptr, 0)
                    _store_output(
                        out_ptr + token.to(tl.int64) * stride_ot, joined_acc, joined_highest, joined_total, sinks_ptr,
                        joined_heads, is_joined, value_scale, stride_oh, HAS_SINKS, VALUE_DIM, BLOCK_DV,
                    )  # fmt: skip


@dataclass(frozen=True, slots=True, eq=False)
class DecodeForm:
    """How queries of a model attend: what its steps share."""

    splitting: Splitting
    units: int
    most_programs: int
    numbers: Mapping[str, Any]  # of the kernel, without the stride of the tables

    @classmethod
    def of(cls, numbers: Mapping[str, Any], num_heads: int, device: torch.device, launch: DecodeLaunch) -> DecodeForm:
        """`numbers`: what decode and prefill share, by name."""
        group = numbers["GROUP"]
        heads = 1 if numbers["HEAD_STEP"] > 0 else min(group, launch.block_m)
        head_tiles = ceil_div(group, heads)
        tiles = num_heads // group * head_tiles
        # Sparse blocks take the registers of a second sum.
        units = launch.units if numbers["SPARSE_BLOCK"] == 0 else 1
        own = {
            "TILES": tiles,
            "BLOCK_N": launch.block_n,
            "SPLIT_KEYS": launch.split_keys,
            "SPLITS": launch.max_splits,
            "UNITS": units,
            "HEADS": heads,
            "HEAD_TILES": head_tiles,
            "BLOCK_M": launch.block_m,
            "ROWS": round_up(heads),
            "JOINED": JOINED,
            "num_warps": launch.num_warps,
            "num_stages": launch.num_stages,
        }
        window = numbers["window"] if numbers["HAS_WINDOW"] else None
        splitting = Splitting(launch.split_keys, launch.max_splits, tiles, launch.block_n, window)
        return cls(splitting, units, num_multiprocessors(device) * launch.programs, {**numbers, **own})


def run_decode(
    output: torch.Tensor,
    rows: tuple[torch.Tensor, ...],
    of_options: tuple[torch.Tensor, ...],
    batch: DeviceBatch,
    form: DecodeForm,
) -> None:
    """Attend, and join what was split.

    The parts take 4 * Hq * (Dv + 2) bytes for each program where a sequence is split, else nothing.
    rows and of_options: the kernel's pointers from query_ptr to block_tables_ptr, and from sinks_ptr on.
    """
    splitting = form.splitting
    work = batch.work(splitting, lambda work: write_list(work, batch, splitting))
    if work is None:
        return
    tiles = splitting.tiles
    num_programs = min(form.most_programs, work.programs.shape[0] * form.units * tiles)
    num_parts = max(work.num_parts, num_programs // tiles)  # or of units
    _, num_heads, value_dim = output.shape
    _prepare(form, num_programs, batch.block_tables.stride(0))(
        output,
        output.new_empty(num_parts, num_heads, value_dim, dtype=torch.float32),
        output.new_empty(num_parts, num_heads, 2, dtype=torch.float32),
        *rows,
        work.programs,
        work.num_programs,
        work.num_done,
        *of_options,
    )


@prepares
def _prepare(form: DecodeForm, num_programs: int, stride_table: int) -> Prepared:
    return prepare(decode_kernel, (num_programs,), {**form.numbers, "stride_table": stride_table})
