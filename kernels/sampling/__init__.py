"""Next tokens from logits, per row, and the log-probabilities that users see: `sample`, `sample_and_check`,
`processed_logits` and `token_logprobs`.

Greedy, or temperature, top-k, top-p, min-p with a seed; penalties, biases and bans before that. The draw of a row
depends on its logits, settings, history, seed and position alone: not on the device, not on the other rows.
"""

from __future__ import annotations

import torch

from kernels.devices import runs_triton
from kernels.sampling import cpu, native, reference
from kernels.sampling.logprobs import TokenLogprobs, token_logprobs
from kernels.sampling.rows import (
    DRAW_PARAMETERS,
    FILTERS,
    IN_COMPLETION,
    IN_PROMPT,
    PENALTIES,
    Adjustments,
    RowParameter,
    SamplingRows,
    check_adjustments,
    check_rows,
    rows_of,
)

# Filters that native code, the Triton kernels and cpu.py know. Rows that use another one take the definition.
COMPILED_FILTERS = frozenset({"top_k", "top_p", "min_p"})

__all__ = [
    "COMPILED_FILTERS",
    "DRAW_PARAMETERS",
    "FILTERS",
    "IN_COMPLETION",
    "IN_PROMPT",
    "PENALTIES",
    "Adjustments",
    "RowParameter",
    "SamplingRows",
    "TokenLogprobs",
    "processed_logits",
    "rows_of",
    "sample",
    "sample_and_check",
    "token_logprobs",
]


def sample(logits: torch.Tensor, rows: SamplingRows | None, adjustments: Adjustments | None = None) -> torch.Tensor:
    """One token id per row, int64 [n], for finite logits [n, vocab] of any float dtype. rows=None: all greedy.

    On a GPU nothing waits for the device, and the launches depend on shapes and on the `has_` fields alone.
    """
    adjustments = _checked(logits, rows, adjustments)
    if len(logits) and native.can_serve(logits) and not _needs_definition(rows):
        return native.sample(logits, rows, adjustments)[0]
    return _sample(logits, rows, adjustments)


def sample_and_check(
    logits: torch.Tensor, rows: SamplingRows | None, adjustments: Adjustments | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """`sample` for any logits, and whether all logits of each row are finite, bool [n].

    The token of a row that is not finite means nothing, and is one of the vocabulary. Native code, and a GPU for rows
    without limits, find both in one pass.
    """
    adjustments = _checked(logits, rows, adjustments)
    if len(logits) and native.can_serve(logits) and not _needs_definition(rows):
        return native.sample(logits, rows, adjustments)
    if len(logits) and runs_triton(logits) and not _needs_definition(rows):
        from kernels.sampling import triton_kernel

        return triton_kernel.sample_and_check(logits, rows, adjustments)
    is_finite = torch.isfinite(logits).all(dim=-1)
    # is_finite is not read from a GPU: the host waits only once, after everything of the step is queued.
    if logits.is_cuda or not is_finite.all():
        logits = logits.masked_fill(~is_finite.unsqueeze(1), 0.0)
    return _sample(logits, rows, adjustments), is_finite


def processed_logits(
    logits: torch.Tensor, rows: SamplingRows | None, adjustments: Adjustments | None = None
) -> torch.Tensor:
    """Logits of the distribution that `sample` draws from, finite float32 [n, vocab]; `token_logprobs` normalises them.

    A greedy row has its adjusted logits. Rows that are not finite get zeros first: what they return means nothing.
    Always the definition: which tokens are kept is the same in every form.
    """
    adjustments = _checked(logits, rows, adjustments)
    logits = logits.masked_fill(~torch.isfinite(logits).all(dim=-1, keepdim=True), 0.0)
    return reference.processed(logits, rows, adjustments)


def _checked(logits: torch.Tensor, rows: SamplingRows | None, adjustments: Adjustments | None) -> Adjustments | None:
    """The adjustments, None where they change no row. Raises ValueError for what does not fit the logits."""
    if logits.dim() != 2 or logits.shape[1] == 0:
        raise ValueError(f"logits is {tuple(logits.shape)}, want [rows, vocabulary]")
    if rows is not None:
        check_rows(logits, rows)
    if adjustments is None:
        return None
    check_adjustments(logits, adjustments)
    return adjustments if len(adjustments.rows) else None


def _needs_definition(rows: SamplingRows | None) -> bool:
    return rows is not None and any(getattr(rows, f"has_{name}") for name in FILTERS if name not in COMPILED_FILTERS)


def _sample(logits: torch.Tensor, rows: SamplingRows | None, adjustments: Adjustments | None) -> torch.Tensor:
    if (rows is None and adjustments is None) or len(logits) == 0:
        return logits.argmax(dim=-1)
    if _needs_definition(rows):
        return reference.sample(logits, rows, adjustments)
    if runs_triton(logits):
        from kernels.sampling import triton_kernel

        return triton_kernel.sample(logits, rows, adjustments)
    if logits.is_cuda:
        return reference.sample(logits, rows, adjustments)
    return cpu.sample(logits, rows, adjustments)
