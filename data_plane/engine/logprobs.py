"""Log-probabilities of a step as they are told: of sampled tokens, and of prompts where a request asks for theirs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from data_plane.plan import Int32Array, RowLogprobs
from kernels.sampling import token_logprobs

# Positions whose logits are looked at together: bounds the memory beside the logits.
_SLICE = 256
# What is told of a token that is less likely than float32 can say: finite, for JSON has no infinity.
LEAST_LOGPROB = np.finfo(np.float32).min


@dataclass(frozen=True, slots=True)
class Asked:
    """Consecutive tokens of one row, and how much is wanted of them."""

    row: int
    first_position: int  # tokens of the row before the first of these
    token_ids: Int32Array  # [n]
    num_top: int


def tell_logprobs(logits: torch.Tensor, asked: Sequence[Asked]) -> list[RowLogprobs]:
    """What was asked, in that order, from the raw logits [sum of n, vocab]: a row of logits for each token.

    Left out is whose logits are not finite: its row fails. Where finite ones lie further apart than float32 reaches,
    LEAST_LOGPROB is told.
    """
    if not asked:
        return []
    counts = [len(part.token_ids) for part in asked]
    num_top = max(part.num_top for part in asked)
    token_ids = torch.from_numpy(np.concatenate([part.token_ids for part in asked]).astype(np.int64))
    slices = [
        token_logprobs(logits[begin : begin + _SLICE], token_ids[begin : begin + _SLICE].to(logits.device), num_top)
        for begin in range(0, len(logits), _SLICE)
    ]
    logprobs, ranks, top_ids, top_logprobs = (
        torch.cat([getattr(part, name) for part in slices]).cpu().numpy()
        for name in ("logprob", "rank", "top_token", "top_logprob")
    )
    logprobs, top_logprobs = np.maximum(logprobs, LEAST_LOGPROB), np.maximum(top_logprobs, LEAST_LOGPROB)
    finite = torch.isfinite(logits).all(dim=-1).cpu().numpy()
    told = []
    end = 0
    for part, count in zip(asked, counts, strict=True):
        begin, end = end, end + count
        if finite[begin:end].all():
            told.append(
                RowLogprobs(
                    part.row,
                    part.first_position,
                    part.token_ids,
                    logprobs[begin:end],
                    ranks[begin:end].astype(np.int32),
                    top_ids[begin:end, : part.num_top].astype(np.int32),
                    top_logprobs[begin:end, : part.num_top],
                )
            )
    return told


def joined(told: Sequence[RowLogprobs]) -> list[RowLogprobs]:
    """The same with one entry for each row: of consecutive pieces of its tokens, given in order."""
    by_row: dict[int, list[RowLogprobs]] = {}
    for part in told:
        by_row.setdefault(part.row, []).append(part)
    return [
        parts[0]
        if len(parts) == 1
        else RowLogprobs(
            row,
            parts[0].first_position,
            *(
                np.concatenate([getattr(part, name) for part in parts])
                for name in ("token_ids", "logprobs", "ranks", "top_token_ids", "top_logprobs")
            ),
        )
        for row, parts in by_row.items()
    ]
