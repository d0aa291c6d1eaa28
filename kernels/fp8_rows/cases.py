"""Shapes of quantize_rows for tests and benchmarks."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Case:
    """One call."""

    name: str
    num_tokens: int
    width: int
    is_strided: bool = False  # x is a column slice of a wider tensor


CASES = (
    Case("no token", 0, 16),
    Case("one token", 1, 64),
    Case("odd size", 3, 37),
    Case("one value", 2, 1),
    Case("strided", 4, 48, is_strided=True),
    Case("wide", 2, 1100),
)


def make(case: Case, dtype: torch.dtype, *, device: str = "cpu", seed: int = 0) -> torch.Tensor:
    """x [num_tokens, width]: rows of all magnitudes, the first one zeros."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(case.num_tokens, case.width + 5 * case.is_strided, generator=generator)
    x *= torch.logspace(-3, 3, case.num_tokens)[:, None]
    x[:1] *= case.num_tokens == 1  # a single row keeps its values
    return x.to(dtype).to(device)[:, : case.width]
