"""Masks of the tokens that a step may sample, and how they change logits."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch

from kernels.devices import upload
from kernels.token_masks import forbid_tokens

_Bits = npt.NDArray[np.uint8]
_Indices = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Masks:
    """Masks of some rows of a step."""

    indices: _Indices  # of the rows among those that sample, which are those of the step without the waiting ones
    # [n, bytes of the longest mask], bit 1: the token is not allowed. No masked row's vocabulary has tokens behind it.
    forbidden: _Bits
    lifted: list[int] = field(default_factory=list)  # rows where only banned tokens are allowed
    failed: list[int] = field(default_factory=list)  # indices of rows whose grammar failed
    waiting: list[int] = field(default_factory=list)  # indices among the step's rows of those whose mask is not ready


def maskable(logits: torch.Tensor) -> torch.Tensor:
    """Logits in a dtype that holds `LOWEST` of forbidden tokens: those of float16 are copied to float32.

    Penalties come after the mask. The lowest float16, -65504, times a repetition penalty of 0.01 is -655, which a
    frequency penalty can give to tokens that are allowed.
    """
    return logits.float() if logits.dtype == torch.float16 else logits


def forbid(logits: torch.Tensor, masks: Masks) -> torch.Tensor:
    """Lower the logits [n, vocab], in place, of every token that is not allowed. They are `maskable`.

    Returns whether the logits of the masked rows were finite before, bool [number of masked rows].
    """
    # Adapters of other rows may have more tokens.
    own = logits[:, : 8 * masks.forbidden.shape[1]]
    return forbid_tokens(own, upload(masks.indices, logits.device), upload(masks.forbidden, logits.device))
