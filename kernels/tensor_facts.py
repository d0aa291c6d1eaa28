"""What a launch depends on of a tensor beside its address: `facts`, by which prepared launches are kept."""

from __future__ import annotations

import torch

# Shape, strides, dtype, device. A plain tuple, since it is made for each launch.
Facts = tuple[torch.Size, tuple[int, ...], torch.dtype, torch.device]


def facts(tensor: torch.Tensor) -> Facts:
    """Of this tensor."""
    return tensor.shape, tensor.stride(), tensor.dtype, tensor.device


def is_dense(of: Facts) -> bool:
    """Whether the values follow one another, as Tensor.is_contiguous says."""
    expected = 1
    for size, stride in zip(reversed(of[0]), reversed(of[1]), strict=True):
        if size != 1 and stride != expected:
            return 0 in of[0]
        expected *= size
    return True
