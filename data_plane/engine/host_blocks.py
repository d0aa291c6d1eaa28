"""KV blocks in host memory, and the moves between them and the device's: where swapped-out rows keep theirs."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from data_plane.engine.rows import Int64Array
from data_plane.plan import Int32Array
from kernels.swap_blocks import swap_blocks


class HostBlocks:
    """Host copies of caches [num_blocks, ...]. On a GPU they are pinned, and moves run beside the computation."""

    def __init__(self, caches: Sequence[torch.Tensor], num_blocks: int) -> None:
        self._caches = list(caches)
        is_cuda = self._caches[0].is_cuda
        self._host = [
            torch.zeros((num_blocks, *cache.shape[1:]), dtype=cache.dtype, pin_memory=is_cuda) for cache in self._caches
        ]
        self._stream = torch.cuda.Stream(self._caches[0].device) if is_cuda else None  # type: ignore[no-untyped-call]  # torch's stubs
        # Blocks that are still being read, and when that is over. At most one batch: the next waits for it.
        self._leaving: tuple[torch.cuda.Event, Int64Array] | None = None

    def move(self, swap_outs: Int32Array, swap_ins: Int32Array) -> None:
        """Copy (block, host block) pairs out, then (host block, block) pairs in.

        What is queued on the current stream later sees the blocks that came in. Blocks that leave may be written
        after `before_writing` alone.
        """
        if len(swap_outs) == 0 and len(swap_ins) == 0:
            return
        outs, ins = (torch.from_numpy(pairs.astype(np.int64)) for pairs in (swap_outs, swap_ins))
        if self._stream is None:
            self._copy(outs, ins)
            return
        current = torch.cuda.current_stream(self._caches[0].device)
        self._stream.wait_stream(current)  # blocks hold what earlier steps wrote, and those have read theirs
        with torch.cuda.stream(self._stream):
            self._copy(outs, ins)
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]  # torch's stubs
            event.record()
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
            torch.cuda.current_stream(self._caches[0].device).wait_event(event)
            self._leaving = None

    def _copy(self, outs: torch.Tensor, ins: torch.Tensor) -> None:
        for cache, host in zip(self._caches, self._host, strict=True):
            swap_blocks(cache, host, outs)
            swap_blocks(host, cache, ins)
