"""Shapes of gated_activation for tests and benchmarks."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Case:
    """One call."""

    name: str
    num_tokens: int
    width: int
    is_strided: bool = False


CASES = (
    Case("no token", 0, 8),
    Case("one token", 1, 64),
    Case("odd size", 3, 37),
    Case("two chunks", 2, 1100),
    Case("strided", 4, 24, is_strided=True),
)


def make(case: Case, dtype: torch.dtype, *, device: str = "cpu", seed: int = 0) -> torch.Tensor:
    """x [num_tokens, 2 * width]."""
    generator = torch.Generator().manual_seed(seed)
    x = 3 * torch.randn(case.num_tokens, 2 * case.width + 5 * case.is_strided, generator=generator)
    return x.to(dtype).to(device)[:, : 2 * case.width]
