"""Log-probabilities in a worker's results: what its rows asked for, and the checks of what it tells. Pure.

A part of the plan encoder, which says when rows begin and are forgotten. What passes goes to clients as it is.
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
class _Asked:
    """What one row asked for."""

    num_top: int | None  # candidates told with each sampled token; None: nothing is
    num_prompt_top: int | None  # the same of the prompt's tokens
    position: int  # tokens of the row before the next sampled one
    prompt_position: int = 1  # the first token of the prompt that may be told next


class ToldLogprobs:
    """Rows of one session that asked for log-probabilities."""

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._asked: dict[int, _Asked] = {}

    def begin(self, row: int, sampling: Sampling, num_known: int) -> None:
        """A row begins with so many known tokens."""
        num_top = num_logprobs(sampling, self._vocab_size)
        if num_top is not None or sampling.num_prompt_logprobs is not None:
            self._asked[row] = _Asked(num_top, sampling.num_prompt_logprobs, num_known)

    def forget(self, row: int) -> None:
        """A row is freed."""
        self._asked.pop(row, None)

    def sampled(
        self, step_id: int, told: plan_pb2.RowLogprobs, token_id: int | None, *, is_sorted: bool
    ) -> PackedLogprobs:
        """Those of the token that a row sampled in a step; `is_sorted`: its candidates must be the most likely first.

        Raises GarbageResult where they are not what is due.
        """
        asked = self._asked.get(told.row)
        logprobs = self._checked(step_id, told, None if asked is None else asked.num_top, of_prompt=False)
        assert asked is not None, "nothing passes of a row that asked for nothing"
        if token_id != logprobs.token_ids[0] or told.first_position != asked.position:
            raise GarbageResult(
                f"step {step_id}: row {told.row} tells of token {logprobs.token_ids[0]} at {told.first_position}, and "
                f"sampled token {token_id} at {asked.position}"
            )
        if is_sorted and (np.diff(logprobs.top_logprobs) > 0).any():
            # A beam search reads its candidates no further than they matter.
            raise GarbageResult(f"step {step_id}: row {told.row} has candidates that do not come most likely first")
        asked.position += 1
        return logprobs

    def of_prompt(self, step_id: int, told: plan_pb2.RowLogprobs) -> PackedLogprobs:
        """Those of tokens of a row's prompt. What is not finite is left out, so that they may come later than due.

        Raises GarbageResult where they are not what the row asked for.
        """
        asked = self._asked.get(told.row)
        logprobs = self._checked(step_id, told, None if asked is None else asked.num_prompt_top, of_prompt=True)
        assert asked is not None, "nothing passes of a row that asked for nothing"
        if told.first_position < asked.prompt_position:
            raise GarbageResult(
                f"step {step_id}: row {told.row} tells of its prompt at {told.first_position} and told of it up to "
                f"{asked.prompt_position - 1}"
            )
        asked.prompt_position = told.first_position + len(logprobs.token_ids)
        return logprobs

    def _checked(
        self, step_id: int, told: plan_pb2.RowLogprobs, num_asked: int | None, *, of_prompt: bool
    ) -> PackedLogprobs:
        """What every one of them must be. Raises GarbageResult."""
        num_tokens, num_top = len(told.token_ids) // 4, told.num_top
        if num_top != num_asked or not (of_prompt or num_tokens == 1):
            raise GarbageResult(
                f"step {step_id}: row {told.row} tells of {num_tokens} tokens with {num_top} candidates each; it asked "
                f"for {num_asked} candidates {'of its prompt' if of_prompt else 'of one token'}"
            )
        sizes = [len(told.logprobs), len(told.ranks), len(told.top_token_ids), len(told.top_logprobs)]
        if num_tokens < 1 or sizes != [4 * num_tokens, 4 * num_tokens, *[4 * num_tokens * num_top] * 2]:
            raise GarbageResult(f"step {step_id}: row {told.row} has log-probabilities of sizes {sizes}")
        token_ids, top_token_ids, ranks = (
            np.frombuffer(data, dtype=_INT32) for data in (told.token_ids, told.top_token_ids, told.ranks)
        )
        for ids in (token_ids, top_token_ids):
            if len(ids) and not 0 <= ids.min() <= ids.max() < self._vocab_size:
                raise GarbageResult(f"step {step_id}: log-probabilities of a token outside 0..{self._vocab_size - 1}")
        if not 1 <= ranks.min() <= ranks.max() <= self._vocab_size:
            raise GarbageResult(f"step {step_id}: row {told.row} has ranks outside 1..{self._vocab_size}")
        logprobs, top_logprobs = (np.frombuffer(d, dtype=_FLOAT32) for d in (told.logprobs, told.top_logprobs))
        if not (np.isfinite(logprobs).all() and np.isfinite(top_logprobs).all()):
            raise GarbageResult(f"step {step_id}: row {told.row} has log-probabilities that are not finite")
        return PackedLogprobs(token_ids, logprobs, ranks, top_token_ids, top_logprobs, num_top)


def num_logprobs(sampling: Sampling, vocab_size: int) -> int | None:
    """A beam search with many stop tokens may ask for more candidates than there are: it gets all of them."""
    return None if sampling.num_logprobs is None else min(sampling.num_logprobs, vocab_size)
