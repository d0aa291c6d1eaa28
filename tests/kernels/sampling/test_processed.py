"""kernels.sampling.processed_logits: the distribution that `sample` draws from."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from kernels.sampling import cpu, processed_logits, reference, rows_of, sample, token_logprobs
from kernels.sampling.cases import make_adjustments
from tests.kernels.sampling.test_processors import VOCAB_SIZE, make_adjustments as adjustments_of_one_row, make_logits

NUM_DRAWS = 20_000


def test_processed_logits_are_transformers_scores() -> None:
    """Repetition penalty, temperature, top-k, top-p and min-p in one row, as generate() returns them in `scores`."""
    logits = make_logits(1)
    prompt, completion = (1, 2, 2, 799), (2, 5, 5)
    processors = LogitsProcessorList(
        [
            RepetitionPenaltyLogitsProcessor(1.7),
            TemperatureLogitsWarper(0.7),
            TopKLogitsWarper(60),
            TopPLogitsWarper(0.9),
            MinPLogitsWarper(0.02),
        ]
    )
    token_ids: Any = torch.tensor([[*prompt, *completion]])
    expected = processors(token_ids, logits.clone()).log_softmax(-1)
    rows = rows_of(1, temperature=0.7, top_k=60, top_p=0.9, min_p=0.02)
    actual = processed_logits(
        logits, rows, adjustments_of_one_row(repetition=1.7, prompt=prompt, completion=completion)
    )
    is_kept = expected.isfinite()
    assert 1 < is_kept.sum() < 60 and torch.equal(actual > torch.finfo(torch.float32).min, is_kept)
    torch.testing.assert_close(actual.log_softmax(-1)[is_kept], expected[is_kept], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("form", [sample, cpu.sample, reference.sample], ids=["the package", "cpu", "definition"])
def test_frequencies_of_draws_are_the_processed_probabilities(form: Any) -> None:
    logits = torch.tensor([[1.5, 1.0, 0.8, 0.3, 0.0, -0.5, -1.0, -9.0]])
    settings: Any = {"temperature": 0.8, "top_k": 6, "top_p": 0.9}
    probabilities = processed_logits(logits, rows_of(1, **settings)).softmax(-1)[0]
    assert 2 < probabilities.gt(0).sum() < 6
    rows = rows_of(NUM_DRAWS, seed=torch.arange(NUM_DRAWS), **settings)
    drawn = torch.bincount(form(logits.expand(NUM_DRAWS, -1).contiguous(), rows, None), minlength=8) / NUM_DRAWS
    assert torch.equal(drawn > 0, probabilities > 0)
    # Five standard deviations of a frequency near 0.4 are 0.017.
    torch.testing.assert_close(drawn, probabilities, rtol=0, atol=0.017)


def test_greedy_rows_keep_every_token_of_their_adjusted_logits() -> None:
    logits = make_logits(3)
    adjustments = make_adjustments(3, VOCAB_SIZE)
    expected = logits.clone()
    expected[adjustments.rows] = reference.adjust(logits, adjustments)
    lowest = torch.finfo(torch.float32).min
    for rows in (None, rows_of(3, temperature=0.0, top_k=2)):
        assert torch.equal(processed_logits(logits, rows, adjustments), expected.clamp(min=lowest))
    assert torch.equal(processed_logits(logits.bfloat16(), None), logits.bfloat16().float())


def test_tokens_that_are_not_kept_have_the_lowest_log_probability_and_a_row_of_nan_harms_no_other() -> None:
    logits = make_logits(2)
    logits[0, 3] = float("nan")
    processed = processed_logits(logits, rows_of(2, temperature=1e-3, top_k=2, top_p=0.5))
    assert processed.isfinite().all()
    best = logits[1].argmax().reshape(1)
    returned = token_logprobs(processed[1:], best, 3)
    assert returned.logprob.tolist() == [0.0] and returned.rank.tolist() == [1]
    assert returned.top_token[0, 0] == best[0] and (returned.top_logprob[0, 1:] < -1e38).all()
