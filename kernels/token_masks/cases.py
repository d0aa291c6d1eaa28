"""Shapes of forbid_tokens for tests and benchmarks."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Case:
    """One call."""

    name: str
    num_rows: int  # of the logits
    rows: tuple[int, ...]  # those with a mask
    vocab_size: int
    share: float = 0.5  # of the tokens that are forbidden
    is_strided: bool = False
    more_bytes: int = 0  # of a mask, after the vocabulary


CASES = (
    Case("no row", 2, (), 40),
    Case("one token", 1, (0,), 1, share=1.0),
    Case("odd size", 3, (1, 2), 1001),
    Case("two parts", 2, (0, 1), 16_384 + 21),
    Case("strided", 4, (0, 3), 300, is_strided=True, more_bytes=3),
    Case("nothing forbidden", 2, (1,), 500, share=0.0),
    Case("all forbidden", 2, (1,), 500, share=1.0),
    Case("nearly all", 3, (0, 1, 2), 500, share=0.99),
)


def make(
    case: Case, dtype: torch.dtype, *, device: str = "cpu", seed: int = 0
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Logits [num_rows, vocab_size], rows [m] and forbidden [m, bytes]. Some logits are not finite."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(case.num_rows, case.vocab_size + 5 * case.is_strided, generator=generator)
    for row, value in zip(case.rows, (float("inf"), float("nan"), float("-inf")), strict=False):
        if row % 2:
            logits[row, (7 * row + 3) % case.vocab_size] = value
    num_bytes = -(-case.vocab_size // 8) + case.more_bytes
    bits = torch.rand(len(case.rows), num_bytes, 8, generator=generator) < case.share
    forbidden = (bits.to(torch.uint8) << torch.arange(8, dtype=torch.uint8)).sum(dim=-1, dtype=torch.uint8)
    rows = torch.tensor(case.rows, dtype=torch.int64)
    return logits.to(dtype).to(device)[:, : case.vocab_size], rows.to(device), forbidden.to(device)
