"""Masks of the tokens that a step may sample, and how they change logits."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch

from kernels.devices import upload

# What the logit of a token that is not allowed becomes. Finite: the check for logits that are not finite stays, and a
# row is left with a distribution where a bias bans every token that is allowed.
_LOWEST = -1e30
_Bits = npt.NDArray[np.uint8]
_Indices = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Masks:
    """Masks of some rows of a step."""

    indices: _Indices  # of the rows among those that sample, which are those of the step without the waiting ones
    forbidden: _Bits  # [n, vocabulary / 8], bit 1: the token is not allowed
    lifted: list[int] = field(default_factory=list)  # rows where only banned tokens are allowed
    failed: list[int] = field(default_factory=list)  # indices of rows whose grammar failed
    waiting: list[int] = field(default_factory=list)  # indices among the step's rows of those whose mask is not ready


def maskable(logits: torch.Tensor) -> torch.Tensor:
    """Logits in a dtype that holds `_LOWEST`: those of float16 are copied to float32.

    Penalties come after the mask. The lowest float16, -65504, times a repetition penalty of 0.01 is -655, which a
    frequency penalty can give to tokens that are allowed.
    """
    return logits.float() if logits.dtype == torch.float16 else logits


def forbid(logits: torch.Tensor, masks: Masks) -> torch.Tensor:
    """Lower the logits [n, vocab], in place, of every token that is not allowed. They are `maskable`.

    Returns whether the logits of the masked rows were finite before, bool [number of masked rows].
    """
    assert logits.dtype != torch.float16, "float16 cannot hold the logit of a token that is not allowed"
    vocab_size = logits.shape[1]
    at = upload(masks.indices, logits.device)
    is_every_row = len(masks.indices) == len(logits)
    own = logits if is_every_row else logits[at]
    finite = own.sum(dim=-1, dtype=torch.float32).isfinite()
    if logits.is_cuda:
        packed = upload(masks.forbidden, logits.device)
        shifts = torch.arange(8, dtype=torch.uint8, device=logits.device)
        bits = (packed.unsqueeze(-1) >> shifts & 1).flatten(1)[:, :vocab_size].bool()
    else:
        unpacked = np.unpackbits(masks.forbidden, axis=1, bitorder="little")[:, :vocab_size]
        bits = torch.from_numpy(unpacked).view(torch.bool)
    own.masked_fill_(bits, _LOWEST)
    if not is_every_row:
        logits[at] = own
    return finite
