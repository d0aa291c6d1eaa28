"""Packed log-probabilities read as the entries that they stand for."""

from __future__ import annotations

import random

import numpy as np
import pytest

from control_plane.scheduler.logprobs import PackedLogprobs, PromptLogprobs
from control_plane.scheduler.types import TokenLogprobs


def entries(rng: random.Random, count: int, num_top: int) -> list[TokenLogprobs]:
    def logprob() -> float:
        return float(np.float32(-rng.random()))

    return [
        TokenLogprobs(
            rng.randrange(99),
            logprob(),
            rng.randrange(9),
            tuple((rng.randrange(99), logprob()) for _ in range(num_top)),
        )
        for _ in range(count)
    ]


def packed(returned: list[TokenLogprobs], num_top: int) -> PackedLogprobs:
    tops = [candidate for entry in returned for candidate in entry.top]
    return PackedLogprobs(
        np.array([entry.token_id for entry in returned], dtype=np.int32),
        np.array([entry.logprob for entry in returned], dtype=np.float32),
        np.array([entry.rank for entry in returned], dtype=np.int32),
        np.array([token_id for token_id, _ in tops], dtype=np.int32),
        np.array([logprob for _, logprob in tops], dtype=np.float32),
        num_top,
    )


@pytest.mark.parametrize("num_top", [0, 1, 3])
def test_chunks_read_as_one_list_whatever_part_is_read(num_top: int) -> None:
    rng = random.Random(num_top)
    returned: list[TokenLogprobs] = []
    prompt = PromptLogprobs()
    for size in (3, 1, 5):
        chunk = entries(rng, size, num_top)
        returned += chunk
        prompt.extend(packed(chunk, num_top) if size != 1 else chunk)  # a list will do as well
    assert prompt == returned and list(prompt) == returned and len(prompt) == 9
    assert [prompt[index] for index in range(-9, 9)] == [returned[index] for index in range(-9, 9)]
    for start in range(-1, 11):
        for stop in range(-1, 11):
            assert prompt[start:stop] == returned[start:stop]
    assert prompt[::2] == returned[::2]
    for index in (9, -10):
        with pytest.raises(IndexError):
            prompt[index]


def test_an_empty_list_has_no_entries() -> None:
    assert PromptLogprobs() == [] and PromptLogprobs()[:] == []
    assert packed([], 2) == []
    assert packed(entries(random.Random(0), 2, 1), 1) != entries(random.Random(1), 2, 1)
