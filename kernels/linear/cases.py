"""Shapes for the tests and benchmarks of linear."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Case:
    """One call."""

    name: str
    num_tokens: int
    in_features: int
    out_features: int
    has_bias: bool = False


CASES = (
    Case("no token", 0, 8, 8),
    Case("one token", 1, 64, 96),
    Case("no output", 3, 8, 0),
    Case("one output", 3, 16, 1),
    Case("odd sizes", 13, 37, 45, has_bias=True),
    Case("one input", 5, 1, 33),
    Case("all row counts of a tile", 25, 64, 64, has_bias=True),
    Case("several blocks of rows", 400, 48, 200),
    Case("several blocks of inputs", 30, 1300, 70, has_bias=True),
    Case("few rows, several long blocks of inputs", 3, 2471, 70, has_bias=True),
    # Behind a whole block of rows, with 16 lanes and with 8: so long that they take more scratch space than the block.
    Case("12 long rows behind 192", 204, 20_001, 33),
    Case("4 long rows behind 64", 68, 20_001, 33),
)

# Of one row: an input narrower than a tile, tiles without and with a rest, inputs past the narrow ones.
ROW_CASES = (
    Case("one token", 1, 64, 96),
    Case("no output", 1, 8, 0),
    Case("one output", 1, 16, 1, has_bias=True),
    Case("one input", 1, 1, 33),
    Case("odd sizes", 1, 37, 45, has_bias=True),
    Case("two tiles", 1, 4096, 6, has_bias=True),
    Case("two tiles and a rest", 1, 5003, 5),
    Case("wide", 1, 9 * 1024, 4),
    Case("wide, odd sizes", 1, 9001, 7, has_bias=True),
)

# Of a few rows: fewer than a tile's and all of them, odd sizes, tiles that programs share.
FEW_ROWS_CASES = (
    Case("two rows", 2, 64, 96),
    Case("no output", 3, 8, 0),
    Case("one output", 3, 16, 1, has_bias=True),
    Case("one input", 5, 1, 33),
    Case("odd sizes", 13, 37, 45, has_bias=True),
    Case("a tile of rows", 16, 512, 128),
    Case("a row more", 17, 528, 130, has_bias=True),
    Case("the most rows, tiles that are shared", 64, 2064, 300),
)


def make(case: Case, dtype: torch.dtype, *, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """x [T, in], weight [out, in] and bias [out] or None; outputs are of order 1."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(case.num_tokens, case.in_features, generator=generator)
    weight = torch.randn(case.out_features, case.in_features, generator=generator) * case.in_features**-0.5
    bias = torch.randn(case.out_features, generator=generator) if case.has_bias else None
    return x.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype)
