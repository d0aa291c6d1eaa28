"""The device code that decode and prefill share: tiles of keys into a softmax, its end, and how a sequence is split."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _load(ptrs, is_row, is_column, MASK_ROWS: tl.constexpr, MASK_COLUMNS: tl.constexpr):
    """A tile; zero where masked."""
    if MASK_ROWS and MASK_COLUMNS:
        tile = tl.load(ptrs, mask=is_row & is_column, other=0.0)
    elif MASK_ROWS:
        tile = tl.load(ptrs, mask=is_row, other=0.0)
    elif MASK_COLUMNS:
        tile = tl.load(ptrs, mask=is_column, other=0.0)
    else:
        tile = tl.load(ptrs)
    return tile


@triton.jit
def attend(
    # the softmax so far, of rows m: weighted values [M, Dv], highest score [M] in units of ln 2, sum of weights [M]
    acc,
    highest,
    total,
    # the rows
    query,  # [M, D]
    position,  # int32 [M]
    slope,  # float32 [M], times log2(e)
    # pointers
    key_ptr,  # [num_blocks, block_size, Hkv, D], at the key head
    value_ptr,  # [num_blocks, block_size, Hkv, Dv]
    table_ptr,  # int32 [max_blocks] of the sequence
    # keys: tiles from begin to end, of which [first_key, end) may be read
    begin,
    end,
    first_key,
    # scores
    score_scale,
    softcap,
    window,
    # strides
    stride_kb,
    stride_kp,
    stride_vb,
    stride_vp,
    # sizes and options
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_SLOPES: tl.constexpr,
    IS_MASKED: tl.constexpr,  # False: every row sees every key of every tile
):
    """Add the keys of some tiles to the softmax of the rows."""
    offs_d = tl.arange(0, BLOCK_D)
    offs_dv = tl.arange(0, BLOCK_DV)
    for start in range(begin, end, BLOCK_N):
        key_pos = start + tl.arange(0, BLOCK_N)
        is_key = (key_pos >= first_key) & (key_pos < end)
        if IS_MASKED:
            block = tl.load(table_ptr + key_pos // BLOCK_SIZE, mask=is_key, other=0).to(tl.int64)
        else:
            block = tl.load(table_ptr + key_pos // BLOCK_SIZE).to(tl.int64)
        place = key_pos % BLOCK_SIZE
        keys = _load(
            key_ptr + (block * stride_kb + place * stride_kp)[None, :] + offs_d[:, None],
            is_key[None, :],
            (offs_d < KEY_DIM)[:, None],
            IS_MASKED,
            BLOCK_D != KEY_DIM,
        ).to(query.dtype)
        scores = tl.dot(query, keys, input_precision="ieee") * score_scale
        if HAS_SOFTCAP:
            # tanh(x) = 1 - 2 / (1 + exp(2 x)); beyond 15 it is 1 in float32.
            bounded = tl.minimum(tl.maximum(scores, -15.0), 15.0)
            scores = softcap * (1.0 - 2.0 / (1.0 + tl.exp(2.0 * bounded)))
        distance = position[:, None] - key_pos[None, :]
        if HAS_SLOPES:
            scores -= slope[:, None] * distance.to(tl.float32)
        if IS_MASKED:
            is_visible = is_key[None, :] & (distance >= 0)
            if HAS_WINDOW:
                is_visible = is_visible & (distance < window)
            scores = tl.where(is_visible, scores, float("-inf"))
        new_highest = tl.maximum(highest, tl.max(scores, 1))
        # A row that has seen no key yet keeps -inf, and weights of zero.
        shift = tl.where(new_highest == float("-inf"), 0.0, new_highest)
        weights = tl.exp2(scores - shift[:, None])
        decay = tl.exp2(highest - shift)
        total = total * decay + tl.sum(weights, 1)
        values = _load(
            value_ptr + (block * stride_vb + place * stride_vp)[:, None] + offs_dv[None, :],
            is_key[:, None],
            (offs_dv < VALUE_DIM)[None, :],
            IS_MASKED,
            BLOCK_DV != VALUE_DIM,
        ).to(query.dtype)
        acc = acc * decay[:, None] + tl.dot(weights.to(query.dtype), values, input_precision="ieee")
        highest = new_highest
    return acc, highest, total


@triton.jit
def finish(acc, highest, total, sinks_ptr, heads, is_row, HAS_SINKS: tl.constexpr):
    """acc over the sum of weights, the sink's among them."""
    if HAS_SINKS:
        sink = tl.load(sinks_ptr + heads, mask=is_row, other=0.0).to(tl.float32) * 1.4426950408889634
        most = tl.maximum(highest, sink)
        decay = tl.exp2(highest - most)
        total = total * decay + tl.exp2(sink - most)
        acc = acc * decay[:, None]
    # Rows that are not stored may have seen no key.
    return acc / tl.where(total == 0.0, 1.0, total)[:, None]


@triton.jit
def decode_range(
    context_len, window, HAS_WINDOW: tl.constexpr, BLOCK_N: tl.constexpr, SPLIT_KEYS: tl.constexpr, SPLITS: tl.constexpr
):
    """(first visible key, first tile's key, keys per split, splits) of a sequence with one query.

    1300 keys, no window, at least 512 a split: splits of 512, 512 and 276 keys.
    """
    first_key = 0
    if HAS_WINDOW:
        first_key = tl.maximum(context_len - window, 0)
    begin = first_key // BLOCK_N * BLOCK_N
    num_keys = context_len - begin
    tiles_per_split = tl.cdiv(tl.cdiv(num_keys, SPLITS), BLOCK_N)
    split_keys = tl.maximum(tiles_per_split * BLOCK_N, SPLIT_KEYS)
    return first_key, begin, split_keys, tl.cdiv(num_keys, split_keys)
