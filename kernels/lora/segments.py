"""Tokens grouped by slot on their device: what the shrink and expand kernels walk over.

The size of the tensors depends on the numbers of tokens and slots and on one bucket of the step, that of its slots.
Building them never waits for the device, so that a captured graph may hold them.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from kernels.buckets import bucket
from kernels.groups import places_within

# The fewest rows of a tensor core product.
MIN_BLOCK_TOKENS = 16
# With more, ptxas before 13.3 could be given the wgmma that it miscompiles; see triton_pages.
MAX_BLOCK_TOKENS = 32
# On a CPU a block's rows are computed in tiles of 3 and 12; its pages come from the caches for all but the first.
HOST_BLOCK_TOKENS = 48
# From so many tokens on, a group is likely to fill blocks of 32, and each block reads its adapter once.
MANY_TOKENS = 512

# Sums of a block that a shrink joins: its modules times its tiles of 16 ranks. With more, the parts stay apart.
COUNTS = 32


class SegmentSizes(NamedTuple):
    """What a launch depends on beside pointers, as plain data: a launch is prepared once for all steps like this."""

    num_tokens: int
    num_blocks: int
    block_tokens: int
    num_slots: int
    is_counted: bool  # parts of sums may be joined
    has_token_slots: bool
    device: torch.device


@dataclass(frozen=True, slots=True)
class AdapterSegments:
    """Blocks of tokens that share a slot. Build them with `adapter_segments`."""

    order: torch.Tensor  # int32 [T]: tokens that have an adapter by slot, each slot's in rising order; then -1
    block_slot: torch.Tensor  # int32 [num_blocks]: the block's slot; -1 for the blocks that are not needed
    block_start: torch.Tensor  # int32 [num_blocks]: the block's first index into order
    block_end: torch.Tensor  # int32 [num_blocks]: past its last
    block_tokens: int  # the most tokens of a block
    num_slots: int  # of the slot table that the slots are of; a block of any other slot has no adapter
    # int32 [num_blocks, COUNTS], zero between launches: how many parts of a sum are computed. None: parts stay apart.
    num_done: torch.Tensor | None = None
    # int32 [T]: the slot of each token; a value outside 0 .. num_slots - 1 means no slot. None: not kept by token.
    token_slots: torch.Tensor | None = None
    sizes: SegmentSizes = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        counts = (self.order.shape[0], self.block_slot.shape[0], self.block_tokens, self.num_slots)
        has = (self.num_done is not None, self.token_slots is not None)
        object.__setattr__(self, "sizes", SegmentSizes(*counts, *has, self.order.device))

    @property
    def num_tokens(self) -> int:
        return self.order.shape[0]

    @property
    def num_blocks(self) -> int:
        return self.block_slot.shape[0]


def max_blocks(num_tokens: int, num_slots: int, block_tokens: int, num_groups: int | None = None) -> int:
    """Blocks that T tokens need at most: G groups fill G + (T - G) // block_tokens.

    Without `num_groups`, how many slots the tokens name, each token or each slot may make a group. 64 tokens of 8 among
    256 slots in blocks of 16: 64 blocks if the 8 is not known, 8 + 56 // 16 = 11 if it is.
    """
    most = min(num_tokens, num_slots)
    if num_groups is not None:
        most = min(most, bucket(max(num_groups, 1)))
    return most + (num_tokens - most) // block_tokens


def default_block_tokens(num_tokens: int) -> int:
    return 2 * MIN_BLOCK_TOKENS if num_tokens >= MANY_TOKENS else MIN_BLOCK_TOKENS


def padded_block_tokens(block_tokens: int) -> int:
    """Rows of a block's product: a power of two, enough for a tensor core."""
    return max(MIN_BLOCK_TOKENS, 1 << (block_tokens - 1).bit_length())


def empty_segments(
    token_slots: torch.Tensor, num_slots: int, block_tokens: int, num_groups: int | None = None
) -> AdapterSegments:
    """Segments of the right sizes whose values are not set."""
    num_tokens = token_slots.shape[0]
    num_blocks = max_blocks(num_tokens, num_slots, block_tokens, num_groups)
    slot, start, end = (token_slots.new_empty(num_blocks) for _ in range(3))
    order = token_slots.new_empty(num_tokens)
    return AdapterSegments(order, slot, start, end, block_tokens, num_slots, token_slots=token_slots)


def segments_in_torch(
    token_slots: torch.Tensor, num_slots: int, block_tokens: int, num_groups: int | None = None
) -> AdapterSegments:
    """The definition, and what runs where there is no Triton."""
    segments = empty_segments(token_slots, num_slots, block_tokens, num_groups)
    has_slot = (token_slots >= 0) & (token_slots < num_slots)
    keys = torch.where(has_slot, token_slots, num_slots)
    ordered, order = torch.sort(keys, stable=True)
    segments.order.copy_(torch.where(ordered < num_slots, order, -1))
    slots = torch.arange(num_slots, device=token_slots.device)
    counts = (keys[None, :] == slots[:, None]).sum(1)
    starts = counts.cumsum(0) - counts
    num_blocks = (counts + block_tokens - 1) // block_tokens
    last_block = num_blocks.cumsum(0)
    block = torch.arange(segments.num_blocks, device=token_slots.device)
    slot = torch.searchsorted(last_block, block, right=True)
    is_used = slot < num_slots
    slot = slot.clamp(max=num_slots - 1)
    start = starts[slot] + (block - last_block[slot] + num_blocks[slot]) * block_tokens
    end = torch.minimum(start + block_tokens, starts[slot] + counts[slot])
    segments.block_slot.copy_(torch.where(is_used, slot, -1))
    segments.block_start.copy_(torch.where(is_used, start, 0))
    segments.block_end.copy_(torch.where(is_used, end, 0))
    return segments


def segments_by_sorting(token_slots: torch.Tensor, num_slots: int, block_tokens: int) -> AdapterSegments:
    """The same as segments_in_torch, at a cost that does not depend on the number of slots."""
    segments = empty_segments(token_slots, num_slots, block_tokens)
    num_tokens, num_blocks = segments.num_tokens, segments.num_blocks
    has_slot = (token_slots >= 0) & (token_slots < num_slots)
    ordered, order = torch.sort(torch.where(has_slot, token_slots, num_slots), stable=True)
    is_used = ordered < num_slots
    segments.order.copy_(torch.where(is_used, order, -1))
    place = torch.arange(num_tokens, device=token_slots.device)
    is_first = torch.ones_like(is_used)
    is_first[1:] = ordered[1:] != ordered[:-1]
    in_group = place - torch.where(is_first, place, 0).cummax(0).values
    begins = is_used & (in_group % block_tokens == 0)
    ends = is_used.clone()
    ends[:-1] &= is_first[1:] | begins[1:]
    block = torch.where(is_used, begins.cumsum(0) - 1, num_blocks)
    # What does not begin or end a block is written after the last block.
    for column, chosen, values, empty in (
        (segments.block_slot, begins, ordered, -1),
        (segments.block_start, begins, place, 0),
        (segments.block_end, ends, place + 1, 0),
    ):
        wide = column.new_full((num_blocks + 1,), empty)
        wide.scatter_(0, torch.where(chosen, block, num_blocks), values.to(column.dtype))
        column.copy_(wide[:num_blocks])
    return segments


def segments_on_host(
    token_slots: npt.NDArray[np.int32], num_slots: int, block_tokens: int = HOST_BLOCK_TOKENS
) -> AdapterSegments:
    """The same blocks without those that are not needed, from slots int32 [T] on the host, for a CPU."""
    has_slot = (token_slots >= 0) & (token_slots < num_slots)
    order = np.argsort(np.where(has_slot, token_slots, num_slots), kind="stable").astype(np.int32)
    num_tokens = int(has_slot.sum())
    order[num_tokens:] = -1
    ordered = token_slots[order[:num_tokens]]
    begins = np.flatnonzero(np.diff(ordered, prepend=-1))  # of each slot's tokens
    counts = np.diff(begins, append=num_tokens)
    num_blocks = -(-counts // block_tokens)
    group = np.repeat(np.arange(len(begins)), num_blocks)
    firsts = begins[group] + places_within(num_blocks) * block_tokens
    columns = (ordered[begins][group], firsts, np.minimum(firsts + block_tokens, begins[group] + counts[group]))
    slot, start, end = (torch.from_numpy(column.astype(np.int32)) for column in columns)
    return AdapterSegments(torch.from_numpy(order), slot, start, end, block_tokens, num_slots)


def split_by_length(segments: AdapterSegments, num_tokens: int) -> tuple[AdapterSegments, AdapterSegments]:
    """The blocks of slots that have fewer tokens, and those of the others. For segments on the host."""
    slots, counts = segments.block_slot.numpy(), (segments.block_end - segments.block_start).numpy()
    is_used = slots >= 0
    tokens_of_slot = np.bincount(slots[is_used], weights=counts[is_used], minlength=1)
    is_long = torch.from_numpy(is_used & (tokens_of_slot[np.maximum(slots, 0)] >= num_tokens))
    short, long = (
        replace(
            segments,
            block_slot=segments.block_slot[chosen],
            block_start=segments.block_start[chosen],
            block_end=segments.block_end[chosen],
        )
        for chosen in (~is_long, is_long)
    )
    return short, long


def blocks_of_one(token_slots: torch.Tensor, num_slots: int) -> AdapterSegments:
    """Every token a block of its own: what the bgmv operators walk over."""
    indices = torch.arange(token_slots.shape[0] + 1, dtype=torch.int32, device=token_slots.device)
    return AdapterSegments(indices[:-1], token_slots, indices[:-1], indices[1:], 1, num_slots)
