"""Block moves on a side stream: what is written and read around them must not notice."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from data_plane.adapters.arena.transfers import PinnedRing
from data_plane.adapters.format.chunk_memory import ChunkMemory
from data_plane.engine.host_blocks import HostBlocks
from data_plane.engine.memory.pinned import pinned_bytes

pytestmark = pytest.mark.gpu


def test_host_blocks_leave_and_return_beside_the_computation() -> None:
    """Blocks are written right after they were moved out, and read right after they came back."""
    caches = [torch.randn(64, 16, 8, 128, device="cuda") for _ in range(8)]
    before = [cache.clone() for cache in caches]
    host = HostBlocks(caches, 32)
    blocks = np.arange(32, dtype=np.int32)
    for _ in range(4):
        host.move(np.stack([blocks, blocks[::-1]], axis=1), blocks[:0].reshape(0, 2))
        host.before_writing(blocks.astype(np.int64))
        for cache in caches:
            cache[:32] = float("nan")
        host.move(blocks[:0].reshape(0, 2), np.stack([blocks[::-1], blocks + 32], axis=1))
        for cache, old in zip(caches, before, strict=True):
            assert torch.equal(cache[32:], old[:32])
            cache[:32] = cache[32:]
    torch.cuda.synchronize()
    num_blocks, move_time_us = host.take_moved()
    assert num_blocks == 4 * (32 + 32) and move_time_us > 0
    assert host.take_moved() == (0, 0)


def test_chunks_in_pinned_memory_are_copied_from_where_they_are() -> None:
    memory = ChunkMemory(pinned_bytes((1 << 20) + 5, "--pinned-bytes").numpy())
    for _ in range(3):  # the whole memory, again and again
        place = memory.take(1 << 20)
        assert place is not None
        values = np.frombuffer(place, dtype="<i2", offset=64).reshape(-1, 8, 4)
        values[...] = np.arange(values.size, dtype="<i2").reshape(values.shape)
        staged = PinnedRing().fill(values, torch.bfloat16)
        assert staged.is_pinned() and staged.data_ptr() == values.ctypes.data
        there = torch.empty_like(staged, device="cuda").copy_(staged, non_blocking=True)
        torch.cuda.synchronize()
        assert np.array_equal(there.view(torch.int16).cpu().numpy(), values)
        del place, values, staged
