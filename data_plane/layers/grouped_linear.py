"""Products of rows with the weights of experts, the rows of one expert side by side."""

from __future__ import annotations

import torch


def grouped_linear(
    x: torch.Tensor, weight: torch.Tensor, ends: torch.Tensor, bias: torch.Tensor | None, *, is_transposed: bool
) -> torch.Tensor:
    """y [S, out] for x [S, in]: expert e multiplies the rows ends[e - 1] to ends[e].

    weight is [experts, out, in], or [experts, in, out] if it is_transposed. ends is int32 [experts]. bias is [S, out],
    that of each row's expert.
    """
    if not is_transposed:
        weight = weight.transpose(-2, -1)
    y = torch.nn.functional.grouped_mm(x, weight, offs=ends)
    return y if bias is None else y.add_(bias)
