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
    if not logits.is_cuda:
        return _forbid_on_cpu(logits, masks)
    vocab_size = logits.shape[1]
    at = upload(masks.indices, logits.device)
    is_every_row = len(masks.indices) == len(logits)
    own = logits if is_every_row else logits[at]
    finite = own.sum(dim=-1, dtype=torch.float32).isfinite()
    packed = upload(masks.forbidden, logits.device)
    shifts = torch.arange(8, dtype=torch.uint8, device=logits.device)
    bits = (packed.unsqueeze(-1) >> shifts & 1).flatten(1)[:, :vocab_size].bool()
    own.masked_fill_(bits, _LOWEST)
    if not is_every_row:
        logits[at] = own
    return finite


# By dtype: integers of its size, and the bits of its exponent, all of which only infinities and NaN have.
_WORDS = {torch.float32: (torch.int32, 0x7F800000), torch.bfloat16: (torch.int16, 0x7F80)}
# Up to this share of the tokens, to write them one by one takes less time than to write a whole row by its mask.
_FEW = 1 / 16


def _forbid_on_cpu(logits: torch.Tensor, masks: Masks) -> torch.Tensor:
    """Row by row, as integers, which stay in the core's cache: torch takes 5 to 10 times as long over all of them."""
    kind, exponent = _WORDS[logits.dtype]
    lowest = int(torch.tensor(_LOWEST, dtype=logits.dtype).view(kind))
    words = logits.view(kind).numpy()
    vocab_size = logits.shape[1]
    finite = np.empty(len(masks.indices), dtype=np.bool_)
    for place, index in enumerate(masks.indices.tolist()):
        row = words[index]
        finite[place] = (row & exponent).max() != exponent
        is_forbidden = np.unpackbits(masks.forbidden[place], count=vocab_size, bitorder="little").view(np.bool_)
        num_forbidden = np.count_nonzero(is_forbidden)
        if num_forbidden <= _FEW * vocab_size:
            row[np.flatnonzero(is_forbidden)] = lowest
        elif vocab_size - num_forbidden <= _FEW * vocab_size:
            allowed = np.flatnonzero(~is_forbidden)
            kept = row[allowed]
            row.fill(lowest)
            row[allowed] = kept
        else:
            np.putmask(row, is_forbidden, lowest)
    return torch.from_numpy(finite)
