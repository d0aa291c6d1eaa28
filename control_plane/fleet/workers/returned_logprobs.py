"""Log-probabilities in a worker's results: what its rows requested, and the checks of what it returns. Pure.

The plan encoder uses it, and says when rows begin and are forgotten. What passes the checks goes to clients unchanged.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from contract.v1 import plan_pb2
from control_plane.fleet.workers.errors import GarbageResult
from control_plane.scheduler.types import PackedLogprobs, Sampling

_INT32 = np.dtype("<i4")
_FLOAT32 = np.dtype("<f4")


@dataclass(slots=True)
class _Requested:
    """What one row requested."""

    num_top: int | None  # candidates returned with each sampled token; None: no log-probabilities
    num_prompt_top: int | None  # the same for the prompt's tokens
    position: int  # tokens of the row before the next sampled one
    vocab_size: int  # of the row's adapter
    prompt_position: int = 1  # the first token of the prompt that may be returned next


class ReturnedLogprobs:
    """Rows of one session that requested log-probabilities."""

    def __init__(self) -> None:
        self._requested: dict[int, _Requested] = {}

    def begin(self, row: int, sampling: Sampling, num_known: int, vocab_size: int) -> None:
        """A row begins; `num_known` tokens of it are known."""
        num_top = num_logprobs(sampling, vocab_size)
        if num_top is not None or sampling.num_prompt_logprobs is not None:
            self._requested[row] = _Requested(num_top, sampling.num_prompt_logprobs, num_known, vocab_size)

    def forget(self, row: int) -> None:
        """A row is freed."""
        self._requested.pop(row, None)

    def sampled(
        self, step_id: int, entry: plan_pb2.RowLogprobs, token_id: int | None, *, is_sorted: bool
    ) -> PackedLogprobs:
        """Log-probabilities of the token that a row sampled in a step. `is_sorted`: the most likely candidate is first.

        Raises GarbageResult if they are not what the row requested.
        """
        requested = self._requested.get(entry.row)
        num_top = None if requested is None else requested.num_top
        logprobs = self._checked(step_id, entry, num_top, 0 if requested is None else requested.vocab_size)
        assert requested is not None, "log-probabilities of a row that requested none passed the checks"
        if token_id != logprobs.token_ids[0] or entry.first_position != requested.position:
            raise GarbageResult(
                f"step {step_id}: row {entry.row} returned log-probabilities of token {logprobs.token_ids[0]} at "
                f"{entry.first_position}; it sampled token {token_id} at {requested.position}"
            )
        if is_sorted and (np.diff(logprobs.top_logprobs) > 0).any():
            # A beam search reads its candidates no further than they matter.
            raise GarbageResult(
                f"step {step_id}: row {entry.row} has candidates out of order: the most likely must be first"
            )
        requested.position += 1
        return logprobs

    def of_prompt(self, step_id: int, entry: plan_pb2.RowLogprobs) -> PackedLogprobs:
        """Log-probabilities of tokens of a row's prompt. Positions may skip: what is not finite is left out.

        Raises GarbageResult if they are not what the row requested.
        """
        requested = self._requested.get(entry.row)
        num_top, vocab_size = (None, 0) if requested is None else (requested.num_prompt_top, requested.vocab_size)
        logprobs = self._checked(step_id, entry, num_top, vocab_size, of_prompt=True)
        assert requested is not None, "log-probabilities of a row that requested none passed the checks"
        if entry.first_position < requested.prompt_position:
            raise GarbageResult(
                f"step {step_id}: row {entry.row} returned its prompt at {entry.first_position}, after it returned "
                f"it up to {requested.prompt_position - 1}"
            )
        requested.prompt_position = entry.first_position + len(logprobs.token_ids)
        return logprobs

    def _checked(
        self,
        step_id: int,
        entry: plan_pb2.RowLogprobs,
        num_requested: int | None,
        vocab_size: int,
        *,
        of_prompt: bool = False,
    ) -> PackedLogprobs:
        """What holds for all log-probabilities. Raises GarbageResult if it does not."""
        num_tokens, num_top = len(entry.token_ids) // 4, entry.num_top
        if num_top != num_requested or not (of_prompt or num_tokens == 1):
            raise GarbageResult(
                f"step {step_id}: row {entry.row} returned {num_tokens} tokens with {num_top} candidates each; it "
                f"requested {num_requested} candidates {'of its prompt' if of_prompt else 'of one token'}"
            )
        sizes = [len(entry.logprobs), len(entry.ranks), len(entry.top_token_ids), len(entry.top_logprobs)]
        if num_tokens < 1 or sizes != [4 * num_tokens, 4 * num_tokens, *[4 * num_tokens * num_top] * 2]:
            raise GarbageResult(f"step {step_id}: row {entry.row} has log-probabilities of sizes {sizes}")
        token_ids, top_token_ids, ranks = (
            np.frombuffer(data, dtype=_INT32) for data in (entry.token_ids, entry.top_token_ids, entry.ranks)
        )
        for ids in (token_ids, top_token_ids):
            if len(ids) and not 0 <= ids.min() <= ids.max() < vocab_size:
                raise GarbageResult(f"step {step_id}: log-probabilities of a token outside 0..{vocab_size - 1}")
        if not 1 <= ranks.min() <= ranks.max() <= vocab_size:
            raise GarbageResult(f"step {step_id}: row {entry.row} has ranks outside 1..{vocab_size}")
        logprobs, top_logprobs = (np.frombuffer(d, dtype=_FLOAT32) for d in (entry.logprobs, entry.top_logprobs))
        if not (np.isfinite(logprobs).all() and np.isfinite(top_logprobs).all()):
            raise GarbageResult(f"step {step_id}: row {entry.row} has log-probabilities that are not finite")
        return PackedLogprobs(token_ids, logprobs, ranks, top_token_ids, top_logprobs, num_top)


def num_logprobs(sampling: Sampling, vocab_size: int) -> int | None:
    """Candidates to request for each token, at most the vocabulary: a beam search may need more than that."""
    return None if sampling.num_logprobs is None else min(sampling.num_logprobs, vocab_size)
