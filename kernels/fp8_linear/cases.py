"""Shapes of fp8_linear for tests and benchmarks."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kernels.fp8 import Fp8Rows
from kernels.fp8_rows.reference import quantize_rows


@dataclass(frozen=True, slots=True)
class Case:
    """One call. Sizes of the weight are multiples of 16, as a GPU wants them."""

    name: str
    num_tokens: int
    in_features: int
    out_features: int
    has_bias: bool = False


CASES = (
    Case("no token", 0, 32, 16),
    Case("one token", 1, 64, 48),
    Case("bias", 3, 48, 16, has_bias=True),
    Case("many tokens", 130, 80, 112),
)


def make(
    case: Case, dtype: torch.dtype, *, device: str = "cpu", seed: int = 0
) -> tuple[Fp8Rows, Fp8Rows, torch.Tensor | None]:
    """x, weight and bias. Outputs of the weight have scales of all magnitudes."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(case.num_tokens, case.in_features, generator=generator)
    weight = torch.randn(case.out_features, case.in_features, generator=generator) / case.in_features**0.5
    weight *= torch.logspace(-2, 0, case.out_features)[:, None]
    bias = torch.randn(case.out_features, generator=generator).to(dtype).to(device) if case.has_bias else None
    rows = [quantize_rows(values.to(dtype)) for values in (x, weight)]
    there = [Fp8Rows(one.codes.to(device), one.scales.to(device)) for one in rows]
    return there[0], there[1], bias
