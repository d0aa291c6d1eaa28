"""copy_blocks, the definition: read all sources, then write."""

from __future__ import annotations

from collections.abc import Sequence

import torch


def copy_blocks(caches: Sequence[torch.Tensor], pairs: torch.Tensor) -> None:
    """cache[pairs[:, 1]] = cache[pairs[:, 0]] for every cache. Also what every device but a GPU runs."""
    for cache in caches:
        on_device = pairs.to(cache.device)
        cache[on_device[:, 1]] = cache[on_device[:, 0]]
