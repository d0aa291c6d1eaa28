"""What the LoRA kernels share: where a page's elements lie, which tokens a block has, and h @ B of some of its columns.

A program takes one block of segments: up to BLOCK_T tokens of one slot. A program returns at once if its block is
unused or if its rank tile lies beyond the slot's rank, so base-model tokens and other adapters' larger ranks cost
nothing. Sums are float32 in a fixed order, without atomics: the same token has the same bits in every batch.

Blocks have 16 or 32 rows, so that every product is mma.sync: ptxas before 13.3 miscompiles pipelined wgmma with an
operand in registers.

A launch of its own expands (triton_expand), and so does the gate, which reads y next (kernels.lora.expansion). A value
has the same bits in both, and whatever the tiles are: neither BLOCK_T nor BLOCK_N nor a token's place in its block
decides in which order it is summed. Both are compiled without fused multiply and add: a compiler could fuse in one
kernel and not in the other.

A tensor core multiplies 16 rows at least. Of a block with fewer tokens each row past them would be computed for
nothing, from the product to the store. So a block of one token has it in every row, one of half as many as rows has
each twice, and each row is left a run of the columns: see `spread`.
"""

from __future__ import annotations

import triton
import triton.language as tl

# Ranks of one step of a program at most, and at least: of an instruction, which sums them in their order. Steps of
# either size have the same bits, for ranks that do not exist add zeros. On an H100 the smaller one takes a fifth less.
EXPAND_RANKS, LEAST_EXPAND_RANKS = 32, 16


@triton.jit
def pages_at(
    page_ids_ptr,
    first,
    num_tiles,
    offs_r,
    is_rank,
    column,
    num_columns,
    BLOCK_C: tl.constexpr,
    TILE_WIDTH: tl.constexpr,
    PAGE_RANKS: tl.constexpr,
):
    """Pages that hold ranks offs_r and BLOCK_C columns from `column` on, its multiple: int32 [R], or [R, C] of several.

    Zero for what does not exist.
    """
    ids_ptr = page_ids_ptr + first + (offs_r // PAGE_RANKS) * num_tiles
    if TILE_WIDTH % BLOCK_C == 0:  # all columns are of one tile
        pages = tl.load(ids_ptr + column // TILE_WIDTH, mask=is_rank & (column < num_columns), other=0)
    else:
        offs_c = column + tl.arange(0, BLOCK_C)
        is_inside = is_rank[:, None] & (offs_c < num_columns)[None, :]
        pages = tl.load(ids_ptr[:, None] + (offs_c // TILE_WIDTH)[None, :], mask=is_inside, other=0)
    return pages


@triton.jit
def page_offsets(
    pages,
    offs_r,
    is_rank,
    column,
    num_columns,
    BLOCK_C: tl.constexpr,
    TILE_WIDTH: tl.constexpr,
    PAGE_RANKS: tl.constexpr,
):
    """Offsets [R, C] into the pages of a matrix for ranks and columns of `pages_at`, and which exist."""
    offs_c = column + tl.arange(0, BLOCK_C)
    in_page = (offs_r % PAGE_RANKS) * TILE_WIDTH
    is_inside = is_rank[:, None] & (offs_c < num_columns)[None, :]
    if TILE_WIDTH % BLOCK_C == 0:
        rows = pages.to(tl.int64) * (PAGE_RANKS * TILE_WIDTH) + in_page
        # Without the hint the values are loaded one by one, and not ahead of their product.
        in_tile = tl.multiple_of(column % TILE_WIDTH, BLOCK_C)
        offsets = rows[:, None] + (in_tile + tl.arange(0, BLOCK_C))[None, :]
    else:
        offsets = pages.to(tl.int64) * (PAGE_RANKS * TILE_WIDTH) + in_page[:, None] + (offs_c % TILE_WIDTH)[None, :]
    return offsets, is_inside


@triton.jit
def load_vector(values_ptr, page_ids_ptr, start, offs, mask, other, PAGE_VALUES: tl.constexpr):
    """float32 values `start + offs` over the pages in the order of page_ids; `other` for all if start is negative."""
    at = start + offs
    mask = mask & (start >= 0)
    page = tl.load(page_ids_ptr + at // PAGE_VALUES, mask=mask, other=0).to(tl.int64)
    return tl.load(values_ptr + page * PAGE_VALUES + at % PAGE_VALUES, mask=mask, other=other)


@triton.jit
def block_tokens(order_ptr, block_start_ptr, block_end_ptr, block, BLOCK_T: tl.constexpr):
    """The tokens of a block as int64 [BLOCK_T], and which of them exist."""
    return tokens_between(order_ptr, tl.load(block_start_ptr + block), tl.load(block_end_ptr + block), BLOCK_T)


@triton.jit
def tokens_between(order_ptr, start, end, BLOCK_T: tl.constexpr):
    """The tokens order[start : end] as int64 [BLOCK_T], and which of them exist."""
    offs = start + tl.arange(0, BLOCK_T)
    is_token = offs < end
    return tl.load(order_ptr + offs, mask=is_token, other=0).to(tl.int64), is_token


@triton.jit
def h_of(
    h_ptr,
    tokens,  # int64 [T]
    is_token,
    module,
    rank_begin,
    rank,
    width,
    stride_hp,
    stride_hs,
    stride_ht,
    BLOCK_T: tl.constexpr,
    BLOCK_R: tl.constexpr,
    NUM_PLANES: tl.constexpr,
    H_ALIGN: tl.constexpr,
):
    """BLOCK_R ranks of h of each token, the sum of the planes, float32 [T, R]. Zero past the rank."""
    # Runs of H_ALIGN ranks are read at once, also those past the slot's rank, which are then dropped.
    room = width // H_ALIGN * H_ALIGN
    h_rows = h_ptr + module.to(tl.int64) * (stride_hs // H_ALIGN * H_ALIGN)
    h_rows += tokens * (stride_ht // H_ALIGN * H_ALIGN)
    offs_r = rank_begin + tl.arange(0, BLOCK_R)
    is_h = is_token[:, None] & (offs_r < room)[None, :]
    h = tl.zeros((BLOCK_T, BLOCK_R), tl.float32)
    for plane in tl.static_range(NUM_PLANES):
        h_plane = h_rows + tl.cast(plane, tl.int64) * (stride_hp // H_ALIGN * H_ALIGN)
        h += tl.load(h_plane[:, None] + offs_r[None, :], mask=is_h, other=0.0)
    return tl.where((offs_r < rank)[None, :], h, 0.0)


@triton.jit
def b_tile(
    pages,
    pages_ptr,
    rank_begin,
    rank,
    column,
    out_features,
    BLOCK_R: tl.constexpr,
    BLOCK_N: tl.constexpr,
    TILE_WIDTH: tl.constexpr,
    PAGE_RANKS: tl.constexpr,
):
    """BLOCK_R ranks of BLOCK_N columns of B, in `pages` as b_pages gives them. Zero where there is nothing."""
    offs_r = rank_begin + tl.arange(0, BLOCK_R)
    offsets, is_inside = page_offsets(
        pages, offs_r, offs_r < rank, column, out_features, BLOCK_N, TILE_WIDTH, PAGE_RANKS
    )
    return tl.load(pages_ptr + offsets, mask=is_inside, other=0.0)


@triton.jit
def b_pages(
    page_ids_ptr,
    first,  # of B
    rank_begin,
    rank,
    column,
    out_features,
    BLOCK_R: tl.constexpr,
    BLOCK_N: tl.constexpr,
    TILE_WIDTH: tl.constexpr,
    PAGE_RANKS: tl.constexpr,
):
    """Where b_tile finds its pages."""
    offs_r = rank_begin + tl.arange(0, BLOCK_R)
    return pages_at(
        page_ids_ptr, first, tl.cdiv(out_features, TILE_WIDTH), offs_r, offs_r < rank, column, out_features,
        BLOCK_N, TILE_WIDTH, PAGE_RANKS,
    )  # fmt: skip


@triton.jit
def product(
    h,  # float32 [T, R], its first ranks
    pages,  # of its first ranks
    tokens,
    is_token,
    module,
    first,  # of B
    rank,
    column,
    out_features,
    h_ptr,
    pages_ptr,
    page_ids_ptr,
    width,
    stride_hp,
    stride_hs,
    stride_ht,
    BLOCK_T: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_N: tl.constexpr,
    ONE_STEP: tl.constexpr,
    NUM_PLANES: tl.constexpr,
    H_ALIGN: tl.constexpr,
    TILE_WIDTH: tl.constexpr,
    PAGE_RANKS: tl.constexpr,
):
    """h @ B in some columns of one module for tokens of one slot, float32 [T, N].

    The same bits in every kernel that calls it: neither BLOCK_T nor BLOCK_N nor a token's place among them decides in
    which order a value is summed.
    """
    b = b_tile(pages, pages_ptr, 0, rank, column, out_features, BLOCK_R, BLOCK_N, TILE_WIDTH, PAGE_RANKS)
    acc = tl.zeros((BLOCK_T, BLOCK_N), tl.float32)
    acc = tl.dot(h.to(b.dtype), b, acc, input_precision="ieee")
    if not ONE_STEP:
        for rank_begin in range(BLOCK_R, rank, BLOCK_R):
            more = h_of(
                h_ptr, tokens, is_token, module, rank_begin, rank, width, stride_hp, stride_hs, stride_ht, BLOCK_T,
                BLOCK_R, NUM_PLANES, H_ALIGN,
            )  # fmt: skip
            ids = b_pages(
                page_ids_ptr, first, rank_begin, rank, column, out_features, BLOCK_R, BLOCK_N, TILE_WIDTH, PAGE_RANKS
            )
            b = b_tile(ids, pages_ptr, rank_begin, rank, column, out_features, BLOCK_R, BLOCK_N, TILE_WIDTH, PAGE_RANKS)
            acc = tl.dot(more.to(b.dtype), b, acc, input_precision="ieee")
    return acc


@triton.jit
def tokens_in_rows(order_ptr, start, end, BLOCK_T: tl.constexpr, RUNS: tl.constexpr):
    """The tokens order[start : end] as int64 [BLOCK_T], and which rows have one.

    If columns are spread in RUNS, a block of one token has it in every row, one of half as many as rows has each in
    two; see `spread`.
    """
    if RUNS == 1:
        tokens, is_token = tokens_between(order_ptr, start, end, BLOCK_T)
    else:
        rows = tl.arange(0, BLOCK_T)
        count = end - start
        offs = tl.where(count <= BLOCK_T // 2, rows % (BLOCK_T // 2), rows)
        tokens = tl.load(order_ptr + start + tl.minimum(offs, tl.maximum(count - 1, 0))).to(tl.int64)
        is_token = (offs < count) | (count == 1)
    return tokens, is_token


@triton.jit
def spread(acc, RUNS: tl.constexpr, ROWS: tl.constexpr):
    """Of float32 [T, N] whose rows are ROWS tokens again and again, [T, N / RUNS] in which each value is found once.

    Bit for bit: rows t * ROWS on have run t of the columns. A thread has a part of each row of a product, so that it
    finds its share in its own registers.
    """
    num_rows: tl.constexpr = acc.shape[0]
    runs = tl.reshape(acc.to(tl.int32, bitcast=True), (num_rows, RUNS, acc.shape[1] // RUNS))
    is_own = (tl.arange(0, num_rows) // ROWS)[:, None, None] == tl.arange(0, RUNS)[None, :, None]
    return tl.xor_sum(tl.where(is_own, runs, 0), 1).to(tl.float32, bitcast=True)


@triton.jit
def columns_in_runs(BLOCK_T: tl.constexpr, BLOCK_N: tl.constexpr, RUNS: tl.constexpr, ROWS: tl.constexpr):
    """Which columns `spread` leaves in each place of [T, N / RUNS], and in which rows. RUNS 1: [1, N], in all rows."""
    columns = tl.arange(0, BLOCK_N // RUNS)[None, :]
    if RUNS > 1:
        run = (tl.arange(0, BLOCK_T) // ROWS)[:, None]
        return columns + run * (BLOCK_N // RUNS), run < RUNS
    else:
        return columns, tl.full((1, 1), 1, tl.int1)


@triton.jit
def completed(
    acc,  # float32 [rows, N], a product
    base,  # the same: what y has; zeros if not ADD_INPUTS
    slot,
    module,
    rank,
    scaling,
    offs_n,  # [1 or rows, N]: columns of the module
    is_column,
    y_columns,  # the same: columns of y
    page_ids_ptr,
    values_ptr,
    dora_scale_ptr,
    lora_bias_ptr,
    base_bias_ptr,
    width,
    stride_dora_scale,
    stride_lora_bias,
    ADD_INPUTS: tl.constexpr,
    HAS_DORA_SCALE: tl.constexpr,
    HAS_LORA_BIAS: tl.constexpr,
    HAS_BASE_BIAS: tl.constexpr,
    PAGE_VALUES: tl.constexpr,
):
    """What y gets, before it is rounded; `base` where the slot has no adapter at the module."""
    # A launch cannot raise: a slot of more ranks than h has turns its rows to NaN.
    acc = tl.where(rank > width, float("nan"), acc)
    if HAS_LORA_BIAS:
        start = tl.load(lora_bias_ptr + module.to(tl.int64) * stride_lora_bias + slot)
        acc += load_vector(values_ptr, page_ids_ptr, start, offs_n, is_column, 0.0, PAGE_VALUES)
    acc *= scaling
    if ADD_INPUTS:
        acc += base
    if HAS_DORA_SCALE:
        start = tl.load(dora_scale_ptr + module.to(tl.int64) * stride_dora_scale + slot)
        dora_scale = load_vector(values_ptr, page_ids_ptr, start, offs_n, is_column, 1.0, PAGE_VALUES)
        if HAS_BASE_BIAS:
            own = tl.load(base_bias_ptr + y_columns, mask=is_column, other=0.0)
            # A DoRA scale of 1 changes no bit.
            acc = tl.where(dora_scale == 1.0, acc, dora_scale * (acc - own) + own)
        else:
            acc *= dora_scale
    return tl.where(rank > 0, acc, base)


def runs_of(columns: int, num_warps: int, itemsize: int) -> int:
    """How many runs of columns one token's products are spread in: a product's warps have 8 columns each in turn.

    1 for float32, whose products are not those of tensor cores: every row is computed, and a kernel is compiled in a
    third of the time.
    """
    return max(2, min(LEAST_EXPAND_RANKS, columns // (8 * num_warps))) if itemsize == 2 else 1
