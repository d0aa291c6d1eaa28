"""What the sampling kernels read: a row's values, their order, and their scores.

Rows lie in `parts`, each a program of every launch; whoever reads partial results joins them itself.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from kernels.buckets import round_up
from kernels.sampling.launch import SampleLaunch
from kernels.sampling.rows import SamplingRows


@dataclass(frozen=True, slots=True)
class Launch:
    """What every kernel of one step takes."""

    logits: torch.Tensor  # [n, vocab]
    adjusted: torch.Tensor  # float32 [m, vocab]; the logits where nothing is adjusted, never read then
    source: torch.Tensor  # int32 [n] row of `adjusted`, -1 for a row of the logits
    rows: SamplingRows
    limited: torch.Tensor  # int64 [m] rows that may have a limit
    highest: torch.Tensor  # float32 [n, num_parts] largest value of each part, of rows that have a limit
    lowest: torch.Tensor  # uint32 as int32 [n] lowest kept value, in the order of `ordered`
    num_parts: int  # of a row
    parameters: SampleLaunch

    @property
    def values(self) -> tuple[torch.Tensor, ...]:
        return self.logits, self.adjusted, self.source

    @property
    def sizes(self) -> dict[str, int]:
        return {
            "PARTS": round_up(self.num_parts),
            "PART": self.parameters.part,
            "TILE": self.parameters.tile,
        }


# Stands for what no row draws: below every logit, and finite, so that no difference of two is NaN.
LOWEST = tl.constexpr(-3.4028234663852886e38)


@triton.jit
def load_values(logits_ptr, adjusted_ptr, source, row, offs, vocab_size, stride_ln, stride_lv):
    """Float32 values of a row: its adjusted logits where `source` names their row, else the logits.

    -inf for what is not below infinity: a row that is not finite is sampled too, to no use.
    """
    is_inside = offs < vocab_size
    lowest = float("-inf")
    if source >= 0:
        # Without adjustments the pointer is that of the logits, of their type: both branches must give one type.
        begin_ptr = adjusted_ptr + source.to(tl.int64) * vocab_size
        values = tl.load(begin_ptr + offs, mask=is_inside, other=lowest).to(tl.float32)
    else:
        ptrs = logits_ptr + row * stride_ln + offs.to(tl.int64) * stride_lv
        values = tl.load(ptrs, mask=is_inside, other=lowest).to(tl.float32)
    return tl.where(values < float("inf"), values, lowest)


@triton.jit
def ordered(values):
    """Float32 as uint32 in the same order; -0 is 0."""
    bits = tl.where(values == 0.0, 0.0, values).to(tl.uint32, bitcast=True)
    return bits ^ tl.where((bits >> 31) == 1, 0xFFFFFFFF, 0x80000000).to(tl.uint32)


@triton.jit
def highest_of(highest_ptr, row, num_parts, PARTS: tl.constexpr):
    """The largest value of a row, float32; finite, so that no difference to it is NaN."""
    offs = tl.arange(0, PARTS)
    highest = tl.max(tl.load(highest_ptr + row * num_parts + offs, mask=offs < num_parts, other=float("-inf")), 0)
    return tl.maximum(highest, LOWEST)


@triton.jit
def scaled_scores(values, highest, temperature):
    """(values - highest) / temperature in float64. Greedy rows have no score."""
    divisor = tl.where(temperature > 0, temperature, 1.0).to(tl.float64)
    return (values.to(tl.float64) - highest.to(tl.float64)) / divisor


@triton.jit
def has_limit(temperature_ptr, top_k_ptr, top_p_ptr, min_p_ptr, row):
    """Whether the row draws, and not from all tokens."""
    limited = (tl.load(top_k_ptr + row) > 0) | (tl.load(top_p_ptr + row) < 1.0) | (tl.load(min_p_ptr + row) > 0)
    return limited & (tl.load(temperature_ptr + row) > 0)


@triton.jit
def not_finite(logits_ptr, row, offs, vocab_size, stride_ln, stride_lv):
    """1 for each logit, as it is before adjustments, that is not finite; else 0."""
    ptrs = logits_ptr + row * stride_ln + offs.to(tl.int64) * stride_lv
    return (tl.abs(tl.load(ptrs, mask=offs < vocab_size, other=0.0).to(tl.float32)) < float("inf")).to(tl.int32) ^ 1
