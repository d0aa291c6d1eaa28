"""KV blocks in host memory for swapped-out rows, and the moves between them and the device's blocks."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence

import numpy as np
import torch

from data_plane.engine.memory.pinned import pinned_zeros
from data_plane.engine.rows import Int64Array
from data_plane.plan import Int32Array
from kernels.swap_blocks import BlockSwaps


class HostBlocks:
    """Host copies of caches [num_blocks, ...]. On a GPU they are pinned, and moves run beside the computation."""

    def __init__(self, caches: Sequence[torch.Tensor], num_blocks: int) -> None:
        self._device = caches[0].device
        is_cuda = self._device.type == "cuda"
        shapes = [((num_blocks, *cache.shape[1:]), cache.dtype) for cache in caches]
        if is_cuda:
            host = pinned_zeros(shapes, "--host-kv-bytes")
        else:
            host = [torch.zeros(shape, dtype=dtype) for shape, dtype in shapes]
        self._swaps = BlockSwaps(caches, host)
        self._stream = torch.cuda.Stream(self._device) if is_cuda else None  # type: ignore[no-untyped-call]  # torch's stubs
        # Blocks that are still being copied out, and the event after which they are free. The next batch waits for it.
        self._leaving: tuple[torch.cuda.Event, Int64Array] | None = None
        # Moves that may not have ended: the events before and after each, and its number of blocks.
        self._timed: deque[tuple[torch.cuda.Event, torch.cuda.Event, int]] = deque()
        self._num_moved, self._moved_us = 0, 0.0  # since `take_moved`

    def move(self, swap_outs: Int32Array, swap_ins: Int32Array) -> None:
        """Copy (block, host block) pairs out, then (host block, block) pairs in.

        Work queued on the current stream after this call sees the blocks that came in. Blocks that were copied out may
        be written only after `before_writing`.
        """
        if len(swap_outs) == 0 and len(swap_ins) == 0:
            return
        outs, ins = (torch.from_numpy(pairs.astype(np.int64)) for pairs in (swap_outs, swap_ins))
        if self._stream is None:
            started = time.perf_counter()
            self._swaps.swap_out(outs)
            self._swaps.swap_in(ins)
            self._num_moved += len(outs) + len(ins)
            self._moved_us += (time.perf_counter() - started) * 1e6
            return
        current = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(current)  # earlier steps have written these blocks, or have finished reading them
        with torch.cuda.stream(self._stream):
            before, event = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]  # torch's stubs
            before.record()
            self._swaps.swap_out(outs)
            self._swaps.swap_in(ins)
            event.record()
        self._timed.append((before, event, len(outs) + len(ins)))
        if len(ins):
            current.wait_event(event)
            self._leaving = None
        else:
            leaving = [outs[:, 0].numpy()] + ([self._leaving[1]] if self._leaving is not None else [])
            self._leaving = (event, np.concatenate(leaving))

    def before_writing(self, block_ids: Int64Array) -> None:
        """Let the current stream wait if any of these blocks is still being copied out."""
        if self._leaving is None:
            return
        event, leaving = self._leaving
        if event.query():  # type: ignore[no-untyped-call]  # torch's stubs
            self._leaving = None
        elif np.isin(leaving, block_ids).any():
            torch.cuda.current_stream(self._device).wait_event(event)
            self._leaving = None

    def take_moved(self) -> tuple[int, int]:
        """(blocks, microseconds) of the moves, out and in, that ended since the last call. Does not wait."""
        while self._timed and self._timed[0][1].query():  # type: ignore[no-untyped-call]  # torch's stubs
            before, after, num_blocks = self._timed.popleft()
            self._num_moved += num_blocks
            self._moved_us += before.elapsed_time(after) * 1000
        moved = self._num_moved, round(self._moved_us)
        self._num_moved, self._moved_us = 0, 0.0
        return moved
