"""Next tokens from logits, per row, and the log-probabilities that users see: `sample` and `token_logprobs`.

Greedy, or temperature, top-k, top-p, min-p with a seed; penalties, biases and bans before that. The draw of a row
depends on its logits, settings, history, seed and position alone: not on the device, not on the other rows.
"""

from __future__ import annotations

import torch

from kernels.devices import runs_triton
from kernels.sampling import cpu, reference
from kernels.sampling.logprobs import TokenLogprobs, token_logprobs
from kernels.sampling.rows import IN_ANSWER, IN_PROMPT, Adjustments, SamplingRows, check_adjustments, check_rows

__all__ = ["IN_ANSWER", "IN_PROMPT", "Adjustments", "SamplingRows", "TokenLogprobs", "sample", "token_logprobs"]


def sample(logits: torch.Tensor, rows: SamplingRows | None, adjustments: Adjustments | None = None) -> torch.Tensor:
    """One token id per row, int64 [n], for finite logits [n, vocab] of any float dtype. rows=None: all greedy.

    On a GPU nothing waits for the device, and the launches depend on shapes and on the `has_` fields alone.
    """
    if logits.dim() != 2 or logits.shape[1] == 0:
        raise ValueError(f"logits is {tuple(logits.shape)}, want [rows, vocabulary]")
    if rows is not None:
        check_rows(logits, rows)
    if adjustments is not None:
        check_adjustments(logits, adjustments)
        if len(adjustments.rows) == 0:
            adjustments = None
    if (rows is None and adjustments is None) or len(logits) == 0:
        return logits.argmax(dim=-1)
    if runs_triton(logits):
        from kernels.sampling import triton_kernel

        return triton_kernel.sample(logits, rows, adjustments)
    if logits.is_cuda:
        return reference.sample(logits, rows, adjustments)
    return cpu.sample(logits, rows, adjustments)
