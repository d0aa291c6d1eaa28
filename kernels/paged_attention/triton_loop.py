"""The device code that decode and prefill share: tiles of keys into a softmax, its end, and which keys those are.

Where blocks are sparse, the loop runs over the visible blocks only, numbered one after the other: first the vertical
ones, then the local ones. `sparse_range` counts them, `attend` turns a number into a key's position.
"""

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
def _positions(
    numbers,
    first_vertical,
    num_vertical,
    first_local,
    SPARSE_BLOCK: tl.constexpr,
    VERTICAL_STRIDE: tl.constexpr,
):
    """Positions of keys, and their sparse blocks, by their numbers in the loop: the same without sparsity."""
    positions = numbers
    sparse_block = numbers
    if SPARSE_BLOCK > 0:
        number = numbers // SPARSE_BLOCK
        vertical = first_vertical + number * VERTICAL_STRIDE
        sparse_block = tl.where(number < num_vertical, vertical, first_local + number - num_vertical)
        positions = sparse_block * SPARSE_BLOCK + numbers % SPARSE_BLOCK
    return positions, sparse_block


@triton.jit
def fold(acc, highest, total, more_acc, more_highest, more_total):
    """One softmax over the keys of two: weighted values [..., Dv], highest scores [...], sums of weights [...].

    In one order and without a sum that a compiler may fuse or not: who folds has the same bits. Folded into a softmax
    without keys, the other stays as it is.
    """
    new_highest = tl.maximum(highest, more_highest)
    shift = tl.where(new_highest == float("-inf"), 0.0, new_highest)
    decay = tl.exp2(highest - shift)
    more_decay = tl.exp2(more_highest - shift)
    total = tl.fma(total, decay, more_total * more_decay)
    decay = tl.broadcast_to(tl.expand_dims(decay, -1), acc.shape)
    return tl.fma(acc, decay, more_acc * tl.expand_dims(more_decay, -1)), new_highest, total


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
    key_scale_ptr,  # float32 [num_blocks, block_size, Hkv], at the key head; read only if HAS_TOKEN_SCALES
    value_scale_ptr,
    table_ptr,  # int32 [max_blocks] of the sequence
    # keys: tiles from begin to end, of which [first_key, end) may be read
    begin,
    end,
    first_key,
    # blocks that sparsity shows, from sparse_range
    first_vertical,
    num_vertical,
    first_local,
    unit_keys,  # only if HAS_UNITS
    # scores
    score_scale,
    softcap,
    window,
    # strides
    stride_kb,
    stride_kp,
    stride_vb,
    stride_vp,
    stride_sb,
    stride_sp,
    # sizes and options
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    IS_CAUSAL: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_SLOPES: tl.constexpr,
    HAS_TOKEN_SCALES: tl.constexpr,
    SPARSE_BLOCK: tl.constexpr,  # tokens; 0: no sparsity
    LOCAL_BLOCKS: tl.constexpr,
    VERTICAL_STRIDE: tl.constexpr,
    IS_MASKED: tl.constexpr,  # False: every row sees every key of every tile
    HAS_UNITS: tl.constexpr,  # the softmax begins empty, and each unit of keys is summed by itself before it is folded
):
    """Add the keys of some tiles to the softmax of the rows."""
    if HAS_UNITS:
        whole_acc = acc
        whole_highest = highest
        whole_total = total
        unit_end = begin + unit_keys
    offs_d = tl.arange(0, BLOCK_D)
    offs_dv = tl.arange(0, BLOCK_DV)
    numbers = begin + tl.arange(0, BLOCK_N)
    is_key = (numbers >= first_key) & (numbers < end)
    key_pos, _ = _positions(numbers, first_vertical, num_vertical, first_local, SPARSE_BLOCK, VERTICAL_STRIDE)
    block = tl.load(table_ptr + key_pos // BLOCK_SIZE, mask=is_key, other=0)
    for start in range(begin, end, BLOCK_N):
        if HAS_UNITS:  # noqa: SIM102  # known to the compiler, unlike the other
            if start == unit_end:
                whole_acc, whole_highest, whole_total = fold(whole_acc, whole_highest, whole_total, acc, highest, total)
                acc = tl.zeros_like(acc)
                highest = tl.full(highest.shape, float("-inf"), tl.float32)
                total = tl.zeros_like(total)
                unit_end += unit_keys
        numbers = start + tl.arange(0, BLOCK_N)
        is_key = (numbers >= first_key) & (numbers < end)
        key_pos, sparse_block = _positions(
            numbers, first_vertical, num_vertical, first_local, SPARSE_BLOCK, VERTICAL_STRIDE
        )
        place = key_pos % BLOCK_SIZE
        key_rows = block.to(tl.int64) * stride_kb + place * stride_kp
        value_rows = block.to(tl.int64) * stride_vb + place * stride_vp
        scale_offs = block.to(tl.int64) * stride_sb + place * stride_sp
        # The blocks of the next tile. Were they read where they are used, loads that run ahead would wait for them, and
        # of three stages none would be left for keys and values.
        next_pos, _ = _positions(
            numbers + BLOCK_N, first_vertical, num_vertical, first_local, SPARSE_BLOCK, VERTICAL_STRIDE
        )
        block = tl.load(table_ptr + next_pos // BLOCK_SIZE, mask=numbers + BLOCK_N < end, other=0)
        keys = _load(
            key_ptr + key_rows[:, None] + offs_d[None, :],
            is_key[:, None],
            (offs_d < KEY_DIM)[None, :],
            IS_MASKED,
            BLOCK_D != KEY_DIM,
        ).to(query.dtype)
        scores = tl.dot(query, tl.trans(keys), input_precision="ieee") * score_scale
        if HAS_TOKEN_SCALES:
            key_scale = tl.load(key_scale_ptr + scale_offs, mask=is_key, other=0.0)
            scores *= key_scale[None, :]
        if HAS_SOFTCAP:
            # tanh(x) = 1 - 2 / (1 + exp(2 x)); beyond 15 it is 1 in float32.
            bounded = tl.minimum(tl.maximum(scores, -15.0), 15.0)
            scores = softcap * (1.0 - 2.0 / (1.0 + tl.exp(2.0 * bounded)))
        distance = position[:, None] - key_pos[None, :]
        if HAS_SLOPES:
            scores -= slope[:, None] * distance.to(tl.float32)
        if IS_MASKED:
            is_visible = is_key[None, :]
            if IS_CAUSAL:
                is_visible = is_visible & (distance >= 0)
            if HAS_WINDOW:
                is_visible = is_visible & (distance < window)
            if SPARSE_BLOCK > 0:
                is_local = sparse_block[None, :] > position[:, None] // SPARSE_BLOCK - LOCAL_BLOCKS
                is_vertical = (sparse_block - first_vertical) % VERTICAL_STRIDE == 0
                is_visible = is_visible & (is_local | is_vertical[None, :])
            scores = tl.where(is_visible, scores, float("-inf"))
        new_highest = tl.maximum(highest, tl.max(scores, 1))
        # A row that has seen no key yet keeps -inf, and weights of zero.
        shift = tl.where(new_highest == float("-inf"), 0.0, new_highest)
        weights = tl.exp2(scores - shift[:, None])
        decay = tl.exp2(highest - shift)
        total = tl.fma(total, decay, tl.sum(weights, 1))
        values = _load(
            value_ptr + value_rows[:, None] + offs_dv[None, :],
            is_key[:, None],
            (offs_dv < VALUE_DIM)[None, :],
            IS_MASKED,
            BLOCK_DV != VALUE_DIM,
        )
        if HAS_TOKEN_SCALES:
            weights *= tl.load(value_scale_ptr + scale_offs, mask=is_key, other=0.0)[None, :]
            if query.dtype == tl.float16:
                # Small scales leave float16's range. bfloat16 holds them, and FP8 values exactly.
                mixed = tl.dot(weights.to(tl.bfloat16), values.to(tl.bfloat16))
            else:
                mixed = tl.dot(weights.to(query.dtype), values.to(query.dtype), input_precision="ieee")
        else:
            mixed = tl.dot(weights.to(query.dtype), values.to(query.dtype), input_precision="ieee")
        # Not summed by the product itself: that would be in flight, with its operand in registers, while others are
        # queued, which ptxas before 13.3 miscompiles (triton issue 9433).
        acc = tl.fma(acc, tl.broadcast_to(decay[:, None], acc.shape), mixed)
        highest = new_highest
    if HAS_UNITS:
        acc, highest, total = fold(whole_acc, whole_highest, whole_total, acc, highest, total)
    return acc, highest, total


@triton.jit
def finish(acc, highest, total, sinks_ptr, heads, is_row, value_scale, HAS_SINKS: tl.constexpr):
    """acc over the sum of weights, the sink's among them, times the scale of the values' cache."""
    if HAS_SINKS:
        sink = tl.load(sinks_ptr + heads, mask=is_row, other=0.0).to(tl.float32) * 1.4426950408889634
        most = tl.maximum(highest, sink)
        decay = tl.exp2(highest - most)
        total = tl.fma(total, decay, tl.exp2(sink - most))
        acc = acc * decay[:, None]
    # Rows that are not stored may have seen no key.
    return acc / tl.where(total == 0.0, 1.0, total)[:, None] * value_scale


@triton.jit
def sparse_range(
    first_position,
    last_position,
    head,
    kv_head,
    SPARSE_BLOCK: tl.constexpr,
    LOCAL_BLOCKS: tl.constexpr,
    VERTICAL_STRIDE: tl.constexpr,
    HEAD_STEP: tl.constexpr,
):
    """(first vertical block, how many before the local ones, first local block, keys) for queries at these positions.

    Blocks of 4, 2 local ones, every third, head 0 (offset 1), the query at 30 in block 7: vertical 2 and 5, local 6
    and 7, hence (2, 2, 6, 15): the keys 8 to 11, 20 to 23, 24 to 30.
    """
    offset = 1
    if HEAD_STEP >= 0:
        offset += head * HEAD_STEP
    else:
        offset -= kv_head * HEAD_STEP
    first_local = tl.maximum(first_position // SPARSE_BLOCK - LOCAL_BLOCKS + 1, 0)
    first_vertical = (VERTICAL_STRIDE - offset % VERTICAL_STRIDE) % VERTICAL_STRIDE
    num_vertical = tl.maximum(tl.cdiv(first_local - first_vertical, VERTICAL_STRIDE), 0)
    last_block = last_position // SPARSE_BLOCK
    num_full = num_vertical + last_block - first_local
    return first_vertical, num_vertical, first_local, num_full * SPARSE_BLOCK + last_position % SPARSE_BLOCK + 1


@triton.jit
def num_splits_of(num_keys, SPLIT_KEYS: tl.constexpr, SPLITS: tl.constexpr):
    """How many programs share so many keys: SPLIT_KEYS for each, rounded, and at most SPLITS. None for no keys.

    512 a split: one program has up to 767 keys, two have up to 1279.
    """
    splits = tl.minimum(tl.maximum((num_keys + SPLIT_KEYS // 2) // SPLIT_KEYS, 1), SPLITS)
    return tl.where(num_keys > 0, splits, 0)


@triton.jit
def decode_range(
    context_len,
    window,
    head,
    kv_head,
    HAS_WINDOW: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SPLIT_KEYS: tl.constexpr,
    SPLITS: tl.constexpr,
    UNITS: tl.constexpr,
    SPARSE_BLOCK: tl.constexpr,
    LOCAL_BLOCKS: tl.constexpr,
    VERTICAL_STRIDE: tl.constexpr,
    HEAD_STEP: tl.constexpr,
):
    """What the query of a sequence with one query reads, and how that is split.

    (first visible key, first tile's key, end, first vertical block, vertical blocks, first local block, keys per
    split, splits, keys per unit). Splits are even, up to a tile, and have at most UNITS units of SPLIT_KEYS / UNITS
    keys, or more in longer splits. 1300 keys, no window, 512 a split in four units, tiles of 64: splits of 448, 448 and
    404 keys, each in units of 128 but for its last.
    """
    first_key = 0
    begin = 0
    end = context_len
    first_vertical = 0
    num_vertical = 0
    first_local = 0
    if HAS_WINDOW:
        first_key = tl.maximum(context_len - window, 0)
        begin = first_key // BLOCK_N * BLOCK_N
    if SPARSE_BLOCK > 0:
        first_vertical, num_vertical, first_local, end = sparse_range(
            context_len - 1, context_len - 1, head, kv_head, SPARSE_BLOCK, LOCAL_BLOCKS, VERTICAL_STRIDE, HEAD_STEP
        )
    most_splits = tl.maximum(num_splits_of(end - begin, SPLIT_KEYS, SPLITS), 1)
    split_keys = tl.cdiv(tl.cdiv(end - begin, most_splits), BLOCK_N) * BLOCK_N
    num_splits = tl.cdiv(end - begin, split_keys)
    unit_keys = tl.cdiv(tl.maximum(tl.cdiv(split_keys, UNITS), SPLIT_KEYS // UNITS), BLOCK_N) * BLOCK_N
    return first_key, begin, end, first_vertical, num_vertical, first_local, split_keys, num_splits, unit_keys
