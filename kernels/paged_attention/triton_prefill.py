"""Attention of sequences with several queries: chunks of a prompt over cached prefix and new tokens, encoders, and
queries over an encoder's keys.

Tiles of queries and heads as rows of one product over tiles of keys (FlashAttention's online softmax, Dao 2023). What a
sequence's output is depends on that sequence alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import triton.language as tl

from kernels.buckets import ceil_div
from kernels.paged_attention.device_batch import DeviceBatch
from kernels.paged_attention.launch import PrefillLaunch
from kernels.paged_attention.triton_loop import attend, finish, sparse_range
from kernels.triton_launch import Prepared, kernel, prepare, prepares


@kernel(do_not_specialize=["stride_table", "window"])
def prefill_kernel(
    # pointers
    out_ptr,  # [T, Hq, Dv]
    query_ptr,  # [T, Hq, D]
    key_cache_ptr,
    value_cache_ptr,
    block_tables_ptr,
    table_rows_ptr,
    query_start_ptr,
    context_lens_ptr,
    tiles_ptr,  # int32 [num_tiles, 2]: sequence, first query; or -1
    sinks_ptr,
    slopes_ptr,
    key_scale_ptr,
    value_scale_ptr,
    # scores
    score_scale,
    softcap,
    window,
    value_scale,
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
    GROUP: tl.constexpr,
    HEADS: tl.constexpr,  # query heads of one key head in one tile
    HEAD_TILES: tl.constexpr,
    QUERIES: tl.constexpr,  # per tile; HEADS * QUERIES <= BLOCK_M
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    IS_CAUSAL: tl.constexpr,  # False: every query sees all keys
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
    """QUERIES queries of one sequence times HEADS heads. Grid: (num_tiles, Hkv * HEAD_TILES).

    Row m is query m // HEADS and head m % HEADS of the tile. Tiles of keys that all its queries see need no mask.
    """
    kv_head = tl.program_id(1) // HEAD_TILES
    sequence = tl.load(tiles_ptr + tl.program_id(0) * 2)
    if sequence < 0:
        return
    first_query = tl.load(tiles_ptr + tl.program_id(0) * 2 + 1)
    first_token = tl.load(query_start_ptr + sequence)
    num_queries = tl.load(query_start_ptr + sequence + 1) - first_token
    context_len = tl.load(context_lens_ptr + sequence)

    rows = tl.arange(0, BLOCK_M)
    queries = first_query + rows // HEADS
    in_group = tl.program_id(1) % HEAD_TILES * HEADS + rows % HEADS
    is_row = (rows < HEADS * QUERIES) & (queries < num_queries) & (in_group < GROUP)
    heads = kv_head * GROUP + in_group
    tokens = (first_token + queries).to(tl.int64)
    offs_d = tl.arange(0, BLOCK_D)
    query = tl.load(
        query_ptr + (tokens * stride_qt + heads.to(tl.int64) * stride_qh)[:, None] + offs_d[None, :] * stride_qd,
        mask=is_row[:, None] & (offs_d < KEY_DIM)[None, :],
        other=0.0,
    )
    slope = tl.zeros([BLOCK_M], tl.float32)
    if HAS_SLOPES:
        slope = tl.load(slopes_ptr + heads, mask=is_row, other=0.0).to(tl.float32) * 1.4426950408889634

    # Keys below `begin` are seen by all queries of the tile, those from `end` on by none.
    first_key = 0
    first_vertical = 0
    num_vertical = 0
    first_local = 0
    first_position = context_len - num_queries + first_query
    position = context_len - num_queries + queries
    if IS_CAUSAL:
        begin = (first_position + 1) // BLOCK_N * BLOCK_N
        end = tl.minimum(context_len, first_position + QUERIES)
    else:
        begin = context_len // BLOCK_N * BLOCK_N
        end = context_len
    if HAS_WINDOW:
        first_key = tl.maximum(first_position + 1 - window, 0)
        begin = first_key // BLOCK_N * BLOCK_N
    if SPARSE_BLOCK > 0:
        first_head = kv_head * GROUP + tl.program_id(1) % HEAD_TILES * HEADS
        first_vertical, num_vertical, first_local, end = sparse_range(
            first_position, end - 1, first_head, kv_head, SPARSE_BLOCK, LOCAL_BLOCKS, VERTICAL_STRIDE, HEAD_STEP
        )
        begin = 0
    key_ptr = key_cache_ptr + kv_head.to(tl.int64) * stride_kh
    value_ptr = value_cache_ptr + kv_head.to(tl.int64) * stride_vh
    table_ptr = block_tables_ptr + tl.load(table_rows_ptr + sequence).to(tl.int64) * stride_table
    acc = tl.zeros([BLOCK_M, BLOCK_DV], tl.float32)
    highest = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    if not HAS_WINDOW and SPARSE_BLOCK == 0:
        acc, highest, total = attend(
            acc, highest, total, query, position, slope, key_ptr, value_ptr, key_scale_ptr + kv_head,
            value_scale_ptr + kv_head, table_ptr, 0, begin, 0, 0, 0, 0, 0, score_scale=score_scale, softcap=softcap,
            window=window, stride_kb=stride_kb, stride_kp=stride_kp, stride_vb=stride_vb, stride_vp=stride_vp,
            stride_sb=stride_sb, stride_sp=stride_sp, KEY_DIM=KEY_DIM, VALUE_DIM=VALUE_DIM, BLOCK_D=BLOCK_D,
            BLOCK_DV=BLOCK_DV, BLOCK_SIZE=BLOCK_SIZE, BLOCK_N=BLOCK_N, IS_CAUSAL=IS_CAUSAL, HAS_WINDOW=HAS_WINDOW,
            HAS_SOFTCAP=HAS_SOFTCAP, HAS_SLOPES=HAS_SLOPES, HAS_TOKEN_SCALES=HAS_TOKEN_SCALES,
            SPARSE_BLOCK=SPARSE_BLOCK, LOCAL_BLOCKS=LOCAL_BLOCKS, VERTICAL_STRIDE=VERTICAL_STRIDE, IS_MASKED=False,
            HAS_UNITS=False,
        )  # fmt: skip
    acc, highest, total = attend(
        acc, highest, total, query, position, slope, key_ptr, value_ptr, key_scale_ptr + kv_head,
        value_scale_ptr + kv_head, table_ptr, begin, end, first_key, first_vertical, num_vertical, first_local, 0,
        score_scale=score_scale, softcap=softcap, window=window, stride_kb=stride_kb, stride_kp=stride_kp,
        stride_vb=stride_vb, stride_vp=stride_vp, stride_sb=stride_sb, stride_sp=stride_sp, KEY_DIM=KEY_DIM,
        VALUE_DIM=VALUE_DIM, BLOCK_D=BLOCK_D, BLOCK_DV=BLOCK_DV, BLOCK_SIZE=BLOCK_SIZE, BLOCK_N=BLOCK_N,
        IS_CAUSAL=IS_CAUSAL, HAS_WINDOW=HAS_WINDOW, HAS_SOFTCAP=HAS_SOFTCAP, HAS_SLOPES=HAS_SLOPES,
        HAS_TOKEN_SCALES=HAS_TOKEN_SCALES, SPARSE_BLOCK=SPARSE_BLOCK, LOCAL_BLOCKS=LOCAL_BLOCKS,
        VERTICAL_STRIDE=VERTICAL_STRIDE, IS_MASKED=True, HAS_UNITS=False,
    )  # fmt: skip
    mixed = finish(acc, highest, total, sinks_ptr, heads, is_row, value_scale, HAS_SINKS)
    offs_dv = tl.arange(0, BLOCK_DV)
    tl.store(
        out_ptr + (tokens * stride_ot + heads.to(tl.int64) * stride_oh)[:, None] + offs_dv[None, :],
        mixed.to(out_ptr.dtype.element_ty),
        mask=is_row[:, None] & (offs_dv < VALUE_DIM)[None, :],
    )


@dataclass(frozen=True, slots=True, eq=False)
class PrefillForm:
    """How queries of a model attend: what its steps share."""

    queries: int  # of a tile
    num_tiles: int  # of heads
    numbers: Mapping[str, Any]  # of the kernel, without the batch's

    @classmethod
    def of(cls, numbers: Mapping[str, Any], num_heads: int, launch: PrefillLaunch) -> PrefillForm:
        """`numbers`: what decode and prefill share, by name."""
        group = numbers["GROUP"]
        heads = 1 if numbers["HEAD_STEP"] > 0 else min(group, launch.block_m)
        head_tiles = ceil_div(group, heads)
        own = {
            "HEADS": heads,
            "HEAD_TILES": head_tiles,
            "QUERIES": launch.block_m // heads,
            "BLOCK_M": launch.block_m,
            "BLOCK_N": launch.block_n,
            "num_warps": launch.num_warps,
            "num_stages": launch.num_stages,
        }
        return cls(launch.block_m // heads, num_heads // group * head_tiles, {**numbers, **own})


def run_prefill(
    output: torch.Tensor,
    rows: tuple[torch.Tensor, ...],
    of_options: tuple[torch.Tensor, ...],
    batch: DeviceBatch,
    form: PrefillForm,
) -> None:
    """One program per tile of queries and heads. For rows and of_options see run_decode."""
    work = batch.tiles(form.queries)
    if work.shape[0] == 0:
        return
    _prepare(form, work.shape[0], batch.block_tables.stride(0), batch.is_causal)(
        output, *rows, batch.table_rows, batch.query_start, batch.context_lens, work, *of_options
    )


@prepares
def _prepare(form: PrefillForm, num_tiles: int, stride_table: int, is_causal: bool) -> Prepared:
    of_batch = {"stride_table": stride_table, "IS_CAUSAL": is_causal}
    return prepare(prefill_kernel, (num_tiles, form.num_tiles), {**form.numbers, **of_batch})
