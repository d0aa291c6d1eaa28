"""quantize_rows, the definition. It also serves what the GPU's kernel does not."""

from __future__ import annotations

import torch

from kernels.fp8 import FP8, FP8_MAX, MIN_SCALE, Fp8Rows


def quantize_rows(x: torch.Tensor) -> Fp8Rows:
    """scale = max(max |x| / 448, 2^-64) over a row, codes = x * (1 / scale), rounded to even, at most 448 in size."""
    values = x.float()
    largest = values.abs().amax(dim=1) if x.shape[1] else values.new_zeros(len(x))
    scales = (largest * (1 / FP8_MAX)).clamp(min=MIN_SCALE)
    return Fp8Rows((values * (1 / scales)[:, None]).clamp(-FP8_MAX, FP8_MAX).to(FP8), scales)
