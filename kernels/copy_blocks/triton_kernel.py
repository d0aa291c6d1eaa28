"""copy_blocks on the GPU: one launch for all caches of all layers.

The caches are given as a table of addresses. A block is copied as words, whatever its dtype.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton.language as tl

from kernels.buckets import ceil_div
from kernels.triton_launch import kernel

CHUNK = 1024  # words
WORDS = ((8, tl.int64), (4, tl.int32), (2, tl.int16), (1, tl.int8))  # by size in bytes


@kernel
def _copy_blocks_kernel(
    caches_ptr,  # int64 [num_caches, 2]: address, words per block
    pairs_ptr,  # int64 [num_pairs, 2]: source, destination
    WORD: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """One chunk of one block. Grid: (num_pairs, num_caches, chunks of the largest block)."""
    source = tl.load(pairs_ptr + tl.program_id(0) * 2)
    destination = tl.load(pairs_ptr + tl.program_id(0) * 2 + 1)
    words = tl.load(caches_ptr + tl.program_id(1) * 2 + 1)
    cache = tl.load(caches_ptr + tl.program_id(1) * 2).to(tl.pointer_type(WORD))
    offs = tl.program_id(2) * CHUNK + tl.arange(0, CHUNK)
    values = tl.load(cache + source * words + offs, mask=offs < words)
    tl.store(cache + destination * words + offs, values, mask=offs < words)


def copy_blocks(caches: Sequence[torch.Tensor], pairs: torch.Tensor) -> None:
    """See the package. No destination may be a source too: blocks are read and written in any order."""
    block_bytes = [cache.stride(0) * cache.element_size() for cache in caches]
    odd = [*block_bytes, *(cache.data_ptr() for cache in caches)]
    size, word = next((size, word) for size, word in WORDS if all(number % size == 0 for number in odd))
    table = [(cache.data_ptr(), num_bytes // size) for cache, num_bytes in zip(caches, block_bytes, strict=True)]
    device = caches[0].device
    most_words = max(block_bytes) // size
    _copy_blocks_kernel[(len(pairs), len(caches), ceil_div(most_words, CHUNK))](
        torch.tensor(table, dtype=torch.int64).to(device, non_blocking=True),
        pairs.to(device, non_blocking=True).contiguous(),
        WORD=word,
        CHUNK=CHUNK,
    )
