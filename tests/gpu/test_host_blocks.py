"""Block moves on a side stream: what is written and read around them must not notice."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from data_plane.engine.host_blocks import HostBlocks

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
