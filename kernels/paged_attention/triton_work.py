"""Which programs decode runs: a list of splits that one launch writes on the device, once per step.

The list follows the context lengths that are on the device. The launches follow the number of sequences alone, so that
a captured graph may hold them.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kernels.buckets import round_up
from kernels.paged_attention.device_batch import DeviceBatch, Splitting, Work
from kernels.paged_attention.triton_loop import num_splits_of
from kernels.triton_launch import kernel

BLOCK = 256  # sequences per load


@triton.jit
def _splits_of(
    sequences,
    table_rows_ptr,
    query_start_ptr,
    context_lens_ptr,
    num_seqs,
    window,
    HAS_WINDOW: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SPLIT_KEYS: tl.constexpr,
    SPLITS: tl.constexpr,
):
    """Of sequences with one query and a row of the block tables; 0 of others. At least as many as any head has."""
    is_there = sequences < num_seqs
    first = tl.load(query_start_ptr + sequences, mask=is_there, other=0)
    is_decode = tl.load(query_start_ptr + sequences + 1, mask=is_there, other=0) - first == 1
    is_decode = is_decode & (tl.load(table_rows_ptr + sequences, mask=is_there, other=-1) >= 0)
    context_len = tl.load(context_lens_ptr + sequences, mask=is_there & is_decode, other=0)
    num_keys = context_len
    if HAS_WINDOW:
        num_keys -= tl.maximum(context_len - window, 0) // BLOCK_N * BLOCK_N
    return num_splits_of(num_keys, SPLIT_KEYS, SPLITS)


@kernel(do_not_specialize=["num_seqs", "window"])
def list_kernel(
    programs_ptr,  # int32 [most programs, 4], see Work
    num_programs_ptr,  # int32 [1]
    num_done_ptr,  # int32 [num_tokens, TILES]
    table_rows_ptr,
    query_start_ptr,
    context_lens_ptr,
    num_seqs,
    window,
    HAS_WINDOW: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SPLIT_KEYS: tl.constexpr,
    SPLITS: tl.constexpr,
    SPLITS_BLOCK: tl.constexpr,
    TILES: tl.constexpr,
    TILES_BLOCK: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Writes the programs of one sequence, those of sequences with several splits first. Grid: (num_seqs,)."""
    sequence = tl.program_id(0)
    num_several = 0
    num_all = 0
    several_before = 0
    single_before = 0
    for begin in range(0, num_seqs, BLOCK):
        sequences = begin + tl.arange(0, BLOCK)
        splits = _splits_of(
            sequences, table_rows_ptr, query_start_ptr, context_lens_ptr, num_seqs, window, HAS_WINDOW, BLOCK_N,
            SPLIT_KEYS, SPLITS,
        )  # fmt: skip
        of_several = tl.where(splits > 1, splits, 0)
        is_before = sequences < sequence
        num_several += tl.sum(of_several, 0)
        num_all += tl.sum(splits, 0)
        several_before += tl.sum(tl.where(is_before, of_several, 0), 0)
        single_before += tl.sum(tl.where(is_before, splits - of_several, 0), 0)
    own = _splits_of(
        sequence, table_rows_ptr, query_start_ptr, context_lens_ptr, num_seqs, window, HAS_WINDOW, BLOCK_N,
        SPLIT_KEYS, SPLITS,
    )  # fmt: skip
    first = tl.where(own > 1, several_before, num_several + single_before)
    offs = tl.arange(0, SPLITS_BLOCK)
    token = tl.load(query_start_ptr + sequence)
    entry_ptrs = programs_ptr + (first + offs) * 4
    tl.store(entry_ptrs, token + tl.zeros_like(offs), mask=offs < own)
    tl.store(entry_ptrs + 1, offs, mask=offs < own)
    tl.store(entry_ptrs + 2, tl.load(context_lens_ptr + sequence) + tl.zeros_like(offs), mask=offs < own)
    tl.store(entry_ptrs + 3, tl.load(table_rows_ptr + sequence) + tl.zeros_like(offs), mask=offs < own)
    tiles = tl.arange(0, TILES_BLOCK)
    done_ptrs = num_done_ptr + token * TILES + tiles
    tl.store(done_ptrs, tl.zeros_like(tiles), mask=(tiles < TILES) & (own > 0))
    if sequence == 0:
        tl.store(num_programs_ptr, num_all)


def write_list(work: Work, batch: DeviceBatch, splitting: Splitting) -> None:
    """Fill in work.programs and work.num_programs, and set work.num_done to zero."""
    num_seqs, tiles = len(batch.context_lens), work.num_done.shape[1]
    list_kernel[(num_seqs,)](
        work.programs,
        work.num_programs,
        work.num_done,
        batch.table_rows,
        batch.query_start,
        batch.context_lens,
        num_seqs,
        splitting.window or 0,
        HAS_WINDOW=splitting.window is not None,
        BLOCK_N=splitting.block_n,
        SPLIT_KEYS=splitting.split_keys,
        SPLITS=splitting.max_splits,
        SPLITS_BLOCK=round_up(splitting.max_splits),
        TILES=tiles,
        TILES_BLOCK=round_up(tiles),
        BLOCK=BLOCK,
    )
