"""Shapes of rms_norm for tests and benchmarks."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Case:
    """One call."""

    name: str
    num_tokens: int
    hidden: int
    has_residual: bool = False
    weight_offset: float = 0.0
    is_strided: bool = False  # x is a column slice of a wider tensor


CASES = (
    Case("no token", 0, 8),
    Case("one token", 1, 64),
    Case("odd size", 3, 37),
    Case("one value", 2, 1),
    Case("residual", 5, 48, has_residual=True),
    Case("Gemma", 3, 32, has_residual=True, weight_offset=1.0),
    Case("strided", 4, 24, has_residual=True, is_strided=True),
)


def make(
    case: Case, dtype: torch.dtype, *, device: str = "cpu", seed: int = 0
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """x, weight and residual."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(dtype).to(device)

    x = draw(case.num_tokens, case.hidden + 5 * case.is_strided)[:, : case.hidden]
    return x, draw(case.hidden), draw(case.num_tokens, case.hidden) if case.has_residual else None
