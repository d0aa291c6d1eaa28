"""What the benchmark runs: every op at the shapes of an 8B Llama on a GPU, and at small ones on the CPU."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from benchmarks.kernels import works_attention, works_layer, works_lora, works_sampling
from benchmarks.kernels.work import LLAMA_8B, SMALL, Work


def works(device: torch.device, dtype: torch.dtype, *, is_short: bool) -> Iterator[Work]:
    """All rows, one after the other, so that only one row's inputs are in memory.

    Those with a target first: a limit of time leaves out the last.
    """
    model = LLAMA_8B if device.type == "cuda" else SMALL
    for part in (works_lora, works_attention, works_sampling, works_layer):
        yield from part.works(model, device, dtype, is_short=is_short)
