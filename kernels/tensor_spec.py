"""What a launch depends on of a tensor beside its address, by which prepared launches and checks are kept."""

from __future__ import annotations

from typing import NamedTuple

import torch


class TensorSpec(NamedTuple):
    """Of one tensor."""

    shape: torch.Size
    strides: tuple[int, ...]  # in elements
    dtype: torch.dtype
    device: torch.device

    def is_contiguous(self) -> bool:
        """As Tensor.is_contiguous."""
        expected = 1
        for size, stride in zip(reversed(self.shape), reversed(self.strides), strict=True):
            if size != 1 and stride != expected:
                return 0 in self.shape
            expected *= size
        return True


def spec_of(tensor: torch.Tensor) -> TensorSpec:
    """The tensor's spec."""
    return TensorSpec(tensor.shape, tensor.stride(), tensor.dtype, tensor.device)
