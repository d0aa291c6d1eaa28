"""swap_blocks, the definition: one block after the other."""

from __future__ import annotations

import torch


def swap_blocks(source: torch.Tensor, destination: torch.Tensor, pairs: torch.Tensor) -> None:
    """destination[d] = source[s] for each pair (s, d)."""
    for begin, end in pairs.tolist():
        destination[end] = source[begin].to(destination.device)
