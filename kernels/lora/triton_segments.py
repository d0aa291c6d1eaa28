"""`adapter_segments` in Triton: two launches of one program per slot, no atomics.

Each program reads all token slots, which are few: 8192 tokens and 256 slots are 16 MB from the L2 cache.
"""

from __future__ import annotations

from dataclasses import replace

import torch
import triton.language as tl

from kernels.buckets import round_up
from kernels.lora.segments import COUNTS, AdapterSegments, empty_segments
from kernels.triton_launch import kernel

BLOCK = 1024  # token slots per load


@kernel(do_not_specialize=["num_tokens"])
def count_kernel(token_slots_ptr, counts_ptr, num_tokens, BLOCK: tl.constexpr):
    """counts[s] = tokens of slot s. Grid: [num_slots]."""
    slot = tl.program_id(0)
    total = tl.zeros((BLOCK,), tl.int32)
    for begin in range(0, num_tokens, BLOCK):
        offs_t = begin + tl.arange(0, BLOCK)
        total += (tl.load(token_slots_ptr + offs_t, mask=offs_t < num_tokens, other=-1) == slot).to(tl.int32)
    tl.store(counts_ptr + slot, tl.sum(total))


@kernel(do_not_specialize=["num_tokens", "num_slots", "num_blocks", "block_tokens"])
def place_kernel(
    token_slots_ptr,
    counts_ptr,
    order_ptr,
    block_slot_ptr,
    block_start_ptr,
    block_end_ptr,
    num_done_ptr,
    num_tokens,
    num_slots,
    num_blocks,
    block_tokens,
    BLOCK: tl.constexpr,
    SLOTS: tl.constexpr,
    COUNTS: tl.constexpr,
):
    """Writes the group of one slot and its blocks; the last program what is left over. Grid: [num_slots + 1]."""
    slot = tl.program_id(0)
    offs_s = tl.arange(0, SLOTS)
    before = tl.load(counts_ptr + offs_s, mask=(offs_s < slot) & (offs_s < num_slots), other=0)
    start = tl.sum(before)
    first_block = tl.sum((before + block_tokens - 1) // block_tokens)
    offs = tl.arange(0, BLOCK)
    if slot == num_slots:
        for begin in range(start, num_tokens, BLOCK):
            tl.store(order_ptr + begin + offs, -1, mask=begin + offs < num_tokens)
        for begin in range(first_block, num_blocks, BLOCK):
            is_left = begin + offs < num_blocks
            tl.store(block_slot_ptr + begin + offs, -1, mask=is_left)
            tl.store(block_start_ptr + begin + offs, 0, mask=is_left)
            tl.store(block_end_ptr + begin + offs, 0, mask=is_left)
        for begin in range(0, num_blocks * COUNTS, BLOCK):
            tl.store(num_done_ptr + begin + offs, 0, mask=begin + offs < num_blocks * COUNTS)
    else:
        end = start + tl.load(counts_ptr + slot)
        place = start
        for begin in range(0, num_tokens, BLOCK):
            offs_t = begin + offs
            is_mine = tl.load(token_slots_ptr + offs_t, mask=offs_t < num_tokens, other=-1) == slot
            ones = is_mine.to(tl.int32)
            tl.store(order_ptr + place + tl.cumsum(ones, 0) - 1, offs_t, mask=is_mine)
            place += tl.sum(ones)
        for begin in range(start, end, BLOCK * block_tokens):
            offs_b = begin + offs * block_tokens
            block = first_block + (offs_b - start) // block_tokens
            is_block = (offs_b < end) & (block < num_blocks)
            tl.store(block_slot_ptr + block, slot, mask=is_block)
            tl.store(block_start_ptr + block, offs_b, mask=is_block)
            tl.store(block_end_ptr + block, tl.minimum(offs_b + block_tokens, end), mask=is_block)


def segments(
    token_slots: torch.Tensor,
    num_slots: int,
    block_tokens: int,
    num_groups: int | None = None,
    *,
    block: int = BLOCK,
) -> AdapterSegments:
    """See kernels.lora.adapter_segments."""
    out = empty_segments(token_slots, num_slots, block_tokens, num_groups)
    if out.num_tokens == 0:
        return out
    counts = token_slots.new_empty(num_slots)
    num_done = token_slots.new_empty(out.num_blocks, COUNTS)
    count_kernel[(num_slots,)](token_slots, counts, out.num_tokens, BLOCK=block)
    place_kernel[(num_slots + 1,)](
        token_slots,
        counts,
        out.order,
        out.block_slot,
        out.block_start,
        out.block_end,
        num_done,
        out.num_tokens,
        num_slots,
        out.num_blocks,
        block_tokens,
        BLOCK=block,
        SLOTS=round_up(num_slots),
        COUNTS=COUNTS,
    )
    return replace(out, num_done=num_done)
