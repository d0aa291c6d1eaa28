"""copy_blocks, the definition: read all sources, then write."""

from __future__ import annotations

from collections.abc import Sequence

import torch


def copy_blocks(caches: Sequence[torch.Tensor], pairs: torch.Tensor) -> None:
    """cache[pairs[:, 1]] = cache[pairs[:, 0]] for every cache. Also what every device but a GPU runs."""
    for cache in caches:
        on_device = pairs.to(cache.device)
        blocks = cache.view(torch.uint8) if cache.dtype.itemsize == 1 else cache  # FP8 has no indexed write
        blocks[on_device[:, 1]] = blocks[on_device[:, 0]]
