"""Logits of tokens that constraints forbid. `forbid_tokens` is the only public call."""

from __future__ import annotations

import torch

from kernels.buckets import ceil_div
from kernels.token_masks import cpu, native, reference
from kernels.token_masks.reference import LOWEST

__all__ = ["LOWEST", "forbid_tokens"]

_DTYPES = (torch.float32, torch.bfloat16)


def forbid_tokens(logits: torch.Tensor, rows: torch.Tensor, forbidden: torch.Tensor) -> torch.Tensor:
    """Set the logits [n, vocab] of forbidden tokens to `LOWEST`, in place, in some rows.

    rows int64 [m] ascend. forbidden uint8 [m, at least vocab / 8] has a bit for each token, from the lowest bit of
    the first byte on; 1: the token is forbidden. Returns whether the logits of each of the rows were finite before,
    bool [m].
    """
    if logits.dim() != 2 or logits.dtype not in _DTYPES:
        raise ValueError(f"logits is {tuple(logits.shape)} {logits.dtype}, want [rows, vocabulary] float32 or bfloat16")
    num_bytes = ceil_div(logits.shape[1], 8)
    if forbidden.dtype != torch.uint8 or forbidden.dim() != 2 or forbidden.shape[1] < num_bytes:
        raise ValueError(f"forbidden is {tuple(forbidden.shape)} {forbidden.dtype}, want uint8 [rows, {num_bytes}]")
    if rows.dtype != torch.int64 or rows.shape != forbidden.shape[:1]:
        raise ValueError(f"rows is {tuple(rows.shape)} {rows.dtype}, want int64 [{len(forbidden)}]")
    if native.can_serve(logits, forbidden):
        return native.forbid_tokens(logits, rows, forbidden)
    if logits.device.type == "cpu" and logits.stride(1) == 1:
        return cpu.forbid_tokens(logits, rows, forbidden)
    return reference.forbid_tokens(logits, rows, forbidden)
