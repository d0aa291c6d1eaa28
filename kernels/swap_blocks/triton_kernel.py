"""swap_blocks on the GPU: one launch for all caches of all layers, which reads or writes pinned memory by its address.

The bus is what limits a move, and a few programs keep it busy. More of them would wait on it in the place of the step's
programs, so that the grid is bounded and each program goes through its share of the work.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton.language as tl

from kernels.buckets import ceil_div
from kernels.devices import upload
from kernels.triton_launch import kernel

CHUNK = 1024  # words, at a time, by one program
WORDS = ((8, tl.int64), (4, tl.int32), (2, tl.int16), (1, tl.int8))  # by size in bytes
# In flight at once: 32 programs of 8 KiB. A bus of 64 GB/s and 2 us needs 128 KiB.
MAX_PROGRAMS = 32


@kernel(do_not_specialize=["num_caches", "num_chunks", "num_work"])
def swap_blocks_kernel(
    caches_ptr,  # int64 [num_caches, 3]: addresses in device and host memory, words per block
    pairs_ptr,  # int64 [num_pairs, 2]: source, destination
    num_caches,
    num_chunks,  # of the largest block
    num_work,  # pairs x caches x chunks
    WORD: tl.constexpr,
    IS_OUT: tl.constexpr,
    CHUNK: tl.constexpr,
    PAIRED: tl.constexpr,  # blocks are whole pairs of words, and begin at a multiple of two words
):
    """Chunks of blocks, from one side to the other. Grid: (programs), which take turns with the chunks."""
    offs = tl.arange(0, CHUNK)
    for work in range(tl.program_id(0), num_work, tl.num_programs(0)):
        chunk = work % num_chunks
        entry = caches_ptr + (work // num_chunks) % num_caches * 3
        pair = pairs_ptr + work // (num_chunks * num_caches) * 2
        words = tl.load(entry + 2)
        source = tl.load(entry + (0 if IS_OUT else 1)).to(tl.pointer_type(WORD)) + tl.load(pair) * words
        destination = tl.load(entry + (1 if IS_OUT else 0)).to(tl.pointer_type(WORD)) + tl.load(pair + 1) * words
        if PAIRED:
            source, destination = tl.multiple_of(source, 16), tl.multiple_of(destination, 16)
            words = tl.multiple_of(words, 2)
        first = chunk * CHUNK + offs
        values = tl.load(source + first, mask=first < words)
        tl.store(destination + first, values, mask=first < words)


class Moves:
    """The addresses of caches and their host memory, uploaded once."""

    def __init__(self, caches: Sequence[torch.Tensor], hosts: Sequence[torch.Tensor]) -> None:
        block_bytes = [cache.stride(0) * cache.element_size() for cache in caches]
        sides = list(zip(caches, hosts, strict=True))
        odd = [*block_bytes, *(tensor.data_ptr() for side in sides for tensor in side)]
        size, self._word = next((size, word) for size, word in WORDS if all(number % size == 0 for number in odd))
        self._is_paired = all(number % 16 == 0 for number in odd)
        table = [
            (cache.data_ptr(), host.data_ptr(), num_bytes // size)
            for (cache, host), num_bytes in zip(sides, block_bytes, strict=True)
        ]
        self._device = caches[0].device
        self._table = torch.tensor(table, dtype=torch.int64).to(self._device)
        self._num_chunks = ceil_div(max(block_bytes) // size, CHUNK)

    def move(self, pairs: torch.Tensor, *, is_out: bool) -> None:
        """See BlockSwaps. `pairs` is not empty."""
        num_work = len(pairs) * len(self._table) * self._num_chunks
        swap_blocks_kernel[(min(num_work, MAX_PROGRAMS),)](
            self._table,
            upload(pairs.contiguous().numpy(), self._device),
            len(self._table),
            self._num_chunks,
            num_work,
            WORD=self._word,
            IS_OUT=is_out,
            CHUNK=CHUNK,
            PAIRED=self._is_paired,
        )
