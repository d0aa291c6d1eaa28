"""paged_attention on the GPU: one launch for sequences with one query, one for chunks of several.

Both run the same loop over tiles of keys (FlashAttention's online softmax, Dao 2023) with the query heads of one key
head as rows of one product. Decode splits long sequences over programs and joins the parts in a second launch (Flash-
Decoding, 2023). What a sequence's output is depends on that sequence alone: split and tile borders follow from its own
lengths, parts are joined in order, and no atomics are used.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from kernels.paged_attention.batch import AttentionBatch
from kernels.paged_attention.device_batch import DeviceBatch
from kernels.paged_attention.triton_loop import attend, decode_range, finish

LOG2E = math.log2(math.e)
MAX_HEAD_DIM = 256
# A decode program reads at least so many keys, and a sequence is cut in at most so many parts: 64 sequences of 1k
# tokens with 8 key heads make 1024 programs, one of 128k tokens 512, for the 132 multiprocessors of an H200.
SPLIT_KEYS = 512
MAX_SPLITS = 64


@dataclass(frozen=True, slots=True)
class Tiles:
    """Launch parameters. They depend on the model's shapes alone, never on the batch."""

    block_m: int  # rows: queries x heads
    block_n: int  # keys
    num_warps: int
    num_stages: int


def decode_tiles(group: int, dim: int, itemsize: int) -> Tiles:
    """Rows for a whole group where 32 hold it, since a second tile reads the keys again."""
    block_m = min(max(triton.next_power_of_2(group), 16), 32)
    return Tiles(block_m, 64 if dim * itemsize <= 256 else 32, 4, 3 if dim * itemsize <= 512 else 2)


def prefill_tiles(dim: int, itemsize: int) -> Tiles:
    """One stage: ptxas before 13.3 miscompiles pipelined wgmma with a register operand (triton issue 9433), and
    weights @ values is such a product from 64 rows on."""
    if itemsize > 2:
        return Tiles(16, 32, 4, 1)
    return Tiles(128, 64, 8, 1) if dim <= 128 else Tiles(64, 64, 8, 1)


@triton.jit(do_not_specialize=["stride_table", "num_parts", "window"])
def _decode_kernel(
    # pointers
    out_ptr,  # [T, Hq, Dv]
    part_ptr,  # float32 [num_decodes, Hq, num_parts, Dv]: weighted values of each split
    part_sum_ptr,  # float32 [num_decodes, Hq, num_parts, 2]: highest score, sum of weights
    query_ptr,  # [T, Hq, D]
    key_cache_ptr,
    value_cache_ptr,
    block_tables_ptr,
    query_start_ptr,
    context_lens_ptr,
    decode_sequences_ptr,
    sinks_ptr,  # [Hq]
    slopes_ptr,  # [Hq]
    # scores
    score_scale,
    softcap,
    window,
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
    stride_table,
    num_parts,
    # sizes and options
    GROUP: tl.constexpr,  # query heads of one key head
    HEAD_TILES: tl.constexpr,  # tiles of BLOCK_M query heads of one key head
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
):
    """One split of one sequence with one query, one tile of heads. Grid: (num_decodes, Hkv * HEAD_TILES, num_parts).

    A sequence of one split is finished here; `_combine_kernel` joins the others.
    """
    index = tl.program_id(0)
    kv_head = tl.program_id(1) // HEAD_TILES
    split = tl.program_id(2)
    sequence = tl.load(decode_sequences_ptr + index)
    context_len = tl.load(context_lens_ptr + sequence)
    first_key, begin, split_keys, num_splits = decode_range(
        context_len, window, HAS_WINDOW, BLOCK_N, SPLIT_KEYS, SPLITS
    )
    if split < num_splits:
        token = tl.load(query_start_ptr + sequence).to(tl.int64)
        in_group = tl.program_id(1) % HEAD_TILES * BLOCK_M + tl.arange(0, BLOCK_M)
        is_row = in_group < GROUP
        heads = kv_head * GROUP + in_group
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
            tl.zeros([BLOCK_M, BLOCK_DV], tl.float32),
            tl.full([BLOCK_M], float("-inf"), tl.float32),
            tl.zeros([BLOCK_M], tl.float32),
            query,
            tl.zeros([BLOCK_M], tl.int32) + (context_len - 1),
            slope,
            key_cache_ptr + kv_head.to(tl.int64) * stride_kh,
            value_cache_ptr + kv_head.to(tl.int64) * stride_vh,
            block_tables_ptr + sequence.to(tl.int64) * stride_table,
            start,
            tl.minimum(start + split_keys, context_len),
            first_key,
            score_scale,
            softcap,
            window,
            stride_kb,
            stride_kp,
            stride_vb,
            stride_vp,
            KEY_DIM,
            VALUE_DIM,
            BLOCK_D,
            BLOCK_DV,
            BLOCK_SIZE,
            BLOCK_N,
            HAS_WINDOW,
            HAS_SOFTCAP,
            HAS_SLOPES,
            True,
        )
        offs_dv = tl.arange(0, BLOCK_DV)
        is_stored = is_row[:, None] & (offs_dv < VALUE_DIM)[None, :]
        if num_splits == 1:
            mixed = finish(acc, highest, total, sinks_ptr, heads, is_row, HAS_SINKS)
            row_ptrs = out_ptr + token * stride_ot + heads.to(tl.int64)[:, None] * stride_oh
            tl.store(row_ptrs + offs_dv[None, :], mixed.to(out_ptr.dtype.element_ty), mask=is_stored)
        else:
            num_heads = tl.num_programs(1) // HEAD_TILES * GROUP
            part = (index.to(tl.int64) * num_heads + heads) * num_parts + split
            tl.store(part_ptr + part[:, None] * VALUE_DIM + offs_dv[None, :], acc, mask=is_stored)
            tl.store(part_sum_ptr + part * 2, highest, mask=is_row)
            tl.store(part_sum_ptr + part * 2 + 1, total, mask=is_row)


@triton.jit(do_not_specialize=["num_parts", "window"])
def _combine_kernel(
    # pointers, as in _decode_kernel
    out_ptr,
    part_ptr,
    part_sum_ptr,
    query_start_ptr,
    context_lens_ptr,
    decode_sequences_ptr,
    sinks_ptr,
    # strides
    stride_ot,
    stride_oh,
    num_parts,
    window,
    # sizes and options
    VALUE_DIM: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SPLIT_KEYS: tl.constexpr,
    SPLITS: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_SINKS: tl.constexpr,
):
    """Joins the splits of one sequence and head, in their order. Grid: (num_decodes, Hq)."""
    index = tl.program_id(0)
    head = tl.program_id(1)
    sequence = tl.load(decode_sequences_ptr + index)
    context_len = tl.load(context_lens_ptr + sequence)
    _, _, _, num_splits = decode_range(context_len, window, HAS_WINDOW, BLOCK_N, SPLIT_KEYS, SPLITS)
    if num_splits > 1:
        offs_dv = tl.arange(0, BLOCK_DV)
        acc = tl.zeros([1, BLOCK_DV], tl.float32)
        highest = tl.full([1], float("-inf"), tl.float32)
        total = tl.zeros([1], tl.float32)
        first_part = (index.to(tl.int64) * tl.num_programs(1) + head) * num_parts
        for split in range(0, num_splits):
            part = first_part + split
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
        mixed = finish(acc, highest, total, sinks_ptr, heads, heads >= 0, HAS_SINKS)
        token = tl.load(query_start_ptr + sequence).to(tl.int64)
        row_ptr = out_ptr + token * stride_ot + head.to(tl.int64) * stride_oh
        is_stored = (offs_dv < VALUE_DIM)[None, :]
        tl.store(row_ptr + offs_dv[None, :], mixed.to(out_ptr.dtype.element_ty), mask=is_stored)


@triton.jit(do_not_specialize=["stride_table", "window"])
def _prefill_kernel(
    # pointers
    out_ptr,  # [T, Hq, Dv]
    query_ptr,  # [T, Hq, D]
    key_cache_ptr,
    value_cache_ptr,
    block_tables_ptr,
    query_start_ptr,
    context_lens_ptr,
    tiles_ptr,  # int32 [num_tiles, 2]: sequence, first query
    sinks_ptr,
    slopes_ptr,
    # scores
    score_scale,
    softcap,
    window,
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
    HAS_WINDOW: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    HAS_SLOPES: tl.constexpr,
):
    """QUERIES queries of one sequence times HEADS heads. Grid: (num_tiles, Hkv * HEAD_TILES).

    Row m is query m // HEADS and head m % HEADS of the tile. Tiles of keys that all its queries see need no mask.
    """
    kv_head = tl.program_id(1) // HEAD_TILES
    sequence = tl.load(tiles_ptr + tl.program_id(0) * 2)
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

    first_position = context_len - num_queries + first_query
    position = context_len - num_queries + queries
    end = tl.minimum(context_len, first_position + QUERIES)
    key_ptr = key_cache_ptr + kv_head.to(tl.int64) * stride_kh
    value_ptr = value_cache_ptr + kv_head.to(tl.int64) * stride_vh
    table_ptr = block_tables_ptr + sequence.to(tl.int64) * stride_table
    acc = tl.zeros([BLOCK_M, BLOCK_DV], tl.float32)
    highest = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    if HAS_WINDOW:
        first_key = tl.maximum(first_position + 1 - window, 0)
        begin = first_key // BLOCK_N * BLOCK_N
    else:
        first_key = 0
        begin = (first_position + 1) // BLOCK_N * BLOCK_N
        acc, highest, total = attend(
            acc, highest, total, query, position, slope, key_ptr, value_ptr, table_ptr, 0, begin, 0, score_scale,
            softcap, window, stride_kb, stride_kp, stride_vb, stride_vp, KEY_DIM, VALUE_DIM, BLOCK_D, BLOCK_DV,
            BLOCK_SIZE, BLOCK_N, HAS_WINDOW, HAS_SOFTCAP, HAS_SLOPES, False,
        )  # fmt: skip
    acc, highest, total = attend(
        acc, highest, total, query, position, slope, key_ptr, value_ptr, table_ptr, begin, end, first_key, score_scale,
        softcap, window, stride_kb, stride_kp, stride_vb, stride_vp, KEY_DIM, VALUE_DIM, BLOCK_D, BLOCK_DV, BLOCK_SIZE,
        BLOCK_N, HAS_WINDOW, HAS_SOFTCAP, HAS_SLOPES, True,
    )  # fmt: skip
    mixed = finish(acc, highest, total, sinks_ptr, heads, is_row, HAS_SINKS)
    offs_dv = tl.arange(0, BLOCK_DV)
    tl.store(
        out_ptr + (tokens * stride_ot + heads.to(tl.int64) * stride_oh)[:, None] + offs_dv[None, :],
        mixed.to(out_ptr.dtype.element_ty),
        mask=is_row[:, None] & (offs_dv < VALUE_DIM)[None, :],
    )


def can_serve(key_cache: torch.Tensor, value_cache: torch.Tensor) -> bool:
    """Whether head sizes and layout are what the kernels are written for."""
    dims = (key_cache.shape[3], value_cache.shape[3])
    return max(dims) <= MAX_HEAD_DIM and key_cache.stride(3) == 1 and value_cache.stride(3) == 1


def paged_attention(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    batch: AttentionBatch,
    *,
    scale: float,
    sliding_window: int | None,
    softcap: float | None,
    sinks: torch.Tensor | None,
    alibi_slopes: torch.Tensor | None,
    decode: Tiles | None = None,
    prefill: Tiles | None = None,
    split_keys: int = SPLIT_KEYS,
    max_splits: int = MAX_SPLITS,
) -> torch.Tensor:
    """See the package. The last four replace the launch parameters; split_keys must be a multiple of block_n."""
    num_tokens, num_heads, dim = query.shape
    block_size, num_kv_heads, value_dim = value_cache.shape[1:]
    output = query.new_empty(num_tokens, num_heads, value_dim)
    device_batch = batch.on_device(query.device, block_size)
    options = {
        "score_scale": scale * LOG2E if softcap is None else scale / softcap,
        "softcap": 0.0 if softcap is None else softcap * LOG2E,
        "GROUP": num_heads // num_kv_heads,
        "KEY_DIM": dim,
        "VALUE_DIM": value_dim,
        "BLOCK_D": max(triton.next_power_of_2(dim), 16),
        "BLOCK_DV": max(triton.next_power_of_2(value_dim), 16),
        "BLOCK_SIZE": block_size,
        "window": sliding_window or 0,
        "HAS_WINDOW": sliding_window is not None,
        "HAS_SOFTCAP": softcap is not None,
        "HAS_SINKS": sinks is not None,
        "HAS_SLOPES": alibi_slopes is not None,
        # An option that is off reads nothing of its pointer.
        "sinks_ptr": output if sinks is None else sinks.contiguous(),
        "slopes_ptr": output if alibi_slopes is None else alibi_slopes.contiguous(),
    }
    tensors = (output, query, key_cache, value_cache)
    widest, item_size = max(dim, value_dim), query.element_size()
    decode = decode or decode_tiles(num_heads // num_kv_heads, widest, item_size)
    _launch_decode(tensors, device_batch, options, decode, split_keys, max_splits)
    _launch_prefill(tensors, device_batch, options, prefill or prefill_tiles(widest, item_size))
    return output


def _launch_decode(
    tensors: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor],
    batch: DeviceBatch,
    options: dict[str, Any],
    tiles: Tiles,
    split_keys: int,
    max_splits: int,
) -> None:
    """Attend, then join where a table as wide as this one can hold more than one split."""
    output, query, key_cache, value_cache = tensors
    num_decodes = len(batch.decode_sequences)
    if num_decodes == 0:
        return
    num_heads, value_dim = output.shape[1:]
    most_keys = batch.block_tables.shape[1] * options["BLOCK_SIZE"]
    if options["HAS_WINDOW"]:
        most_keys = min(most_keys, options["window"] + tiles.block_n - 1)
    num_parts = min(triton.cdiv(most_keys, split_keys), max_splits)
    shape = (0,) if num_parts == 1 else (num_decodes, num_heads, num_parts)
    parts = torch.empty(*shape, value_dim, dtype=torch.float32, device=output.device)
    sums = torch.empty(*shape, 2, dtype=torch.float32, device=output.device)
    head_tiles = triton.cdiv(options["GROUP"], tiles.block_m)
    _decode_kernel[(num_decodes, key_cache.shape[2] * head_tiles, num_parts)](
        output,
        parts,
        sums,
        query,
        key_cache,
        value_cache,
        batch.block_tables,
        batch.query_start,
        batch.context_lens,
        batch.decode_sequences,
        **options,
        **_strides(tensors, batch),
        num_parts=num_parts,
        HEAD_TILES=head_tiles,
        BLOCK_M=tiles.block_m,
        BLOCK_N=tiles.block_n,
        SPLIT_KEYS=split_keys,
        SPLITS=max_splits,
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
    )
    if num_parts == 1:
        return
    _combine_kernel[(num_decodes, num_heads)](
        output,
        parts,
        sums,
        batch.query_start,
        batch.context_lens,
        batch.decode_sequences,
        options["sinks_ptr"],
        output.stride(0),
        output.stride(1),
        num_parts,
        options["window"],
        VALUE_DIM=value_dim,
        BLOCK_DV=options["BLOCK_DV"],
        BLOCK_N=tiles.block_n,
        SPLIT_KEYS=split_keys,
        SPLITS=max_splits,
        HAS_WINDOW=options["HAS_WINDOW"],
        HAS_SINKS=options["HAS_SINKS"],
        num_warps=1 if options["BLOCK_DV"] <= 128 else 2,
    )


def _launch_prefill(
    tensors: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor],
    batch: DeviceBatch,
    options: dict[str, Any],
    tiles: Tiles,
) -> None:
    output, query, key_cache, value_cache = tensors
    heads = min(options["GROUP"], tiles.block_m)
    queries = tiles.block_m // heads
    work = batch.tiles(queries)
    if len(work) == 0:
        return
    head_tiles = triton.cdiv(options["GROUP"], heads)
    _prefill_kernel[(len(work), key_cache.shape[2] * head_tiles)](
        output,
        query,
        key_cache,
        value_cache,
        batch.block_tables,
        batch.query_start,
        batch.context_lens,
        work,
        **options,
        **_strides(tensors, batch),
        HEADS=heads,
        HEAD_TILES=head_tiles,
        QUERIES=queries,
        BLOCK_M=tiles.block_m,
        BLOCK_N=tiles.block_n,
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
    )


def _strides(
    tensors: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], batch: DeviceBatch
) -> dict[str, int]:
    """In elements, by the kernels' names."""
    output, query, key_cache, value_cache = tensors
    names = {
        "ot oh": output.stride()[:2],
        "qt qh qd": query.stride(),
        "kb kp kh": key_cache.stride()[:3],
        "vb vp vh": value_cache.stride()[:3],
        "table": batch.block_tables.stride()[:1],
    }
    return {
        f"stride_{name}": stride
        for group, strides in names.items()
        for name, stride in zip(group.split(), strides, strict=True)
    }
