"""Log-probabilities that a step returns: of sampled tokens and of prompt tokens, where requests want them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from data_plane.plan import Int32Array, RowLogprobs
from kernels.devices import upload
from kernels.sampling import token_logprobs

# Positions computed together; this bounds the memory beside the logits.
_SLICE = 256
# Returned for a token that is less likely than float32 can express: finite, because JSON has no infinity.
LEAST_LOGPROB = np.finfo(np.float32).min


@dataclass(frozen=True, slots=True)
class LogprobsRequest:
    """Consecutive tokens of one row whose log-probabilities are requested."""

    row: int
    first_position: int  # tokens of the row before the first of these
    token_ids: Int32Array  # [n]
    num_top: int  # most likely tokens to return beside each


def compute_logprobs(logits: torch.Tensor, requests: Sequence[LogprobsRequest]) -> list[RowLogprobs]:
    """The log-probabilities of each request in order, from raw logits [sum of n, vocab]: a row for each token.

    A request with logits that are not finite is left out: its row fails. Where finite logits differ by more than
    float32 can hold, LEAST_LOGPROB is returned.
    """
    if not requests:
        return []
    counts = [len(part.token_ids) for part in requests]
    num_top = max(part.num_top for part in requests)
    token_ids = upload(np.concatenate([part.token_ids for part in requests]).astype(np.int64), logits.device)
    slices = [
        token_logprobs(logits[begin : begin + _SLICE], token_ids[begin : begin + _SLICE], num_top)
        for begin in range(0, len(logits), _SLICE)
    ]
    logprobs, ranks, top_ids, top_logprobs = (
        torch.cat([getattr(part, name) for part in slices]).cpu().numpy()
        for name in ("logprob", "rank", "top_token", "top_logprob")
    )
    logprobs, top_logprobs = np.maximum(logprobs, LEAST_LOGPROB), np.maximum(top_logprobs, LEAST_LOGPROB)
    finite = torch.isfinite(logits).all(dim=-1).cpu().numpy()
    found = []
    end = 0
    for part, count in zip(requests, counts, strict=True):
        begin, end = end, end + count
        if finite[begin:end].all():
            found.append(
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
    return found


def joined(logprobs: Sequence[RowLogprobs]) -> list[RowLogprobs]:
    """One entry for each row, from consecutive pieces of its tokens in order."""
    by_row: dict[int, list[RowLogprobs]] = {}
    for part in logprobs:
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
