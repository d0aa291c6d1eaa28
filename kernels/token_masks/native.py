"""The native forbid_tokens: the structure that forbid.c takes, and the op run alone."""

from __future__ import annotations

import ctypes

import torch

from kernels.buckets import ceil_div
from kernels.native import DTYPES, Step, has_native, integers, pointers, run_one

PART = 16384  # tokens of a task, as forbid.c has it


class Forbidding(ctypes.Structure):
    """The source's argument; forbid.c says what the fields are."""

    _fields_ = [  # ctypes wants a list
        *pointers("logits", "rows", "forbidden", "is_finite"),
        *integers("stride", "vocab", "dtype", "num_rows", "mask_bytes"),
    ]


def can_serve(logits: torch.Tensor, forbidden: torch.Tensor) -> bool:
    """Whether the native op takes these: on the CPU, with dense rows."""
    return logits.stride(1) == 1 and forbidden.stride(1) == 1 and has_native(logits, forbidden)


def forbid_tokens(logits: torch.Tensor, rows: torch.Tensor, forbidden: torch.Tensor) -> torch.Tensor:
    """See the package."""
    rows, vocab_size = rows.contiguous(), logits.shape[1]
    is_finite = torch.empty(len(rows), ceil_div(vocab_size, PART), dtype=torch.bool)
    problem = Forbidding(
        logits=logits.data_ptr(),
        rows=rows.data_ptr(),
        forbidden=forbidden.data_ptr(),
        is_finite=is_finite.data_ptr(),
        stride=logits.stride(0),
        vocab=vocab_size,
        dtype=DTYPES[logits.dtype],
        num_rows=len(rows),
        mask_bytes=forbidden.stride(0),
    )
    run_one("forbid", problem, Step())
    return is_finite.all(dim=1)
