"""Shapes and adjustments of sampling for tests and benchmarks."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kernels.sampling.rows import Adjustments


@dataclass(frozen=True, slots=True)
class Case:
    """One step's sampling rows."""

    name: str
    num_rows: int
    vocab_size: int


CASES = (
    Case("one row of two tokens", 1, 2),
    Case("odd vocabulary", 3, 257),
    Case("a step", 32, 8192),
    Case("large vocabulary", 8, 128_256),
)


def make_adjustments(num_rows: int, vocab_size: int) -> Adjustments:
    """Every second row adjusted, the first of them without a history; biases and bans on all."""
    generator = torch.Generator().manual_seed(0)
    rows = torch.arange(0, num_rows, 2)
    count = len(rows)

    def between(low: float, high: float) -> torch.Tensor:
        return torch.rand(count, generator=generator) * (high - low) + low

    times = torch.randint(0, 16, (count, vocab_size), generator=generator, dtype=torch.int32)
    pairs = torch.randperm(count * vocab_size, generator=generator)[: 3 * count]
    bias = torch.randn(len(pairs), generator=generator) * 5
    bias[::3] = float("-inf")
    return Adjustments(
        rows=rows.flip(0),
        repetition=between(0.5, 2),
        presence=between(-2, 2),
        frequency=between(-4, -1),
        history_row=torch.arange(count) - 1,
        history=torch.where(times > 5, times - 5, 0),
        bias_row=pairs // vocab_size,
        bias_token=pairs % vocab_size,
        bias=bias,
    )
