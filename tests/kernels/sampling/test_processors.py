"""What is kept and how logits are changed, against transformers' processors and the formulas that users know."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from kernels.sampling import IN_COMPLETION, IN_PROMPT, Adjustments
from kernels.sampling.reference import adjust, kept_scores

VOCAB_SIZE = 800
NO_IDS: Any = torch.zeros(1, 0, dtype=torch.int64)  # transformers says LongTensor


def make_logits(num_rows: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(num_rows, VOCAB_SIZE, generator=torch.Generator().manual_seed(seed)) * 3


@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p", "min_p"),
    [
        (1.0, 0, 1.0, 0.0),
        (0.6, 0, 1.0, 0.0),
        (1.0, 17, 1.0, 0.0),
        (1.0, 0, 0.8, 0.0),
        (1.0, 0, 1.0, 0.05),
        (0.7, 50, 0.9, 0.02),
        (2.5, 50, 0.3, 0.0),
        (1.5, 5000, 0.999, 0.001),
        (0.9, 1, 0.5, 0.5),
    ],
)
def test_distribution_is_that_of_transformers_warpers_in_their_order(
    temperature: float, top_k: int, top_p: float, min_p: float
) -> None:
    logits = make_logits(8, seed=int(100 * temperature))
    warpers = LogitsProcessorList([TemperatureLogitsWarper(temperature)])
    if top_k:
        warpers.append(TopKLogitsWarper(top_k))
    if top_p < 1:
        warpers.append(TopPLogitsWarper(top_p))
    if min_p:
        warpers.append(MinPLogitsWarper(min_p))
    expected = warpers(NO_IDS, logits.clone())
    settings = [
        torch.full((8,), value, dtype=dtype)
        for value, dtype in (
            (temperature, torch.float32),
            (top_k, torch.int64),
            (top_p, torch.float32),
            (min_p, torch.float32),
        )
    ]
    actual = kept_scores(logits, *settings)
    assert torch.equal(actual.isinf(), expected.isinf())
    torch.testing.assert_close(actual.softmax(-1).float(), expected.softmax(-1), rtol=1e-5, atol=1e-7)


def make_adjustments(
    *,
    repetition: float = 1.0,
    presence: float = 0.0,
    frequency: float = 0.0,
    prompt: tuple[int, ...] = (),
    completion: tuple[int, ...] = (),
    biases: dict[int, float] | None = None,
) -> Adjustments:
    """Of one row."""
    history = torch.zeros(1, VOCAB_SIZE, dtype=torch.int32)
    history[0, list(prompt)] = IN_PROMPT
    for token in completion:
        history[0, token] += IN_COMPLETION
    biases = biases or {}
    return Adjustments(
        rows=torch.tensor([0]),
        repetition=torch.tensor([repetition]),
        presence=torch.tensor([presence]),
        frequency=torch.tensor([frequency]),
        history_row=torch.tensor([0 if prompt or completion else -1]),
        history=history,
        bias_row=torch.zeros(len(biases), dtype=torch.int64),
        bias_token=torch.tensor(list(biases), dtype=torch.int64),
        bias=torch.tensor(list(biases.values()), dtype=torch.float32),
    )


@pytest.mark.parametrize("penalty", [1.2, 0.5, 7.0])
def test_repetition_penalty_is_transformers_bit_for_bit(penalty: float) -> None:
    logits = make_logits(1)
    prompt, completion = (1, 2, 2, 799), (2, 5, 5)
    expected = RepetitionPenaltyLogitsProcessor(penalty)(torch.tensor([[*prompt, *completion]]), logits.clone())
    actual = adjust(logits, make_adjustments(repetition=penalty, prompt=prompt, completion=completion))
    assert torch.equal(actual, expected)
    assert not torch.equal(actual, logits)


def test_bias_comes_before_the_repetition_penalty_as_in_transformers() -> None:
    logits = make_logits(1)
    biases = {5: 4.0, 6: -30.0, 700: 2.5}
    ids: Any = torch.tensor([[5, 6, 7]])
    processors = LogitsProcessorList(
        [
            SequenceBiasLogitsProcessor([[[token], bias] for token, bias in biases.items()]),
            RepetitionPenaltyLogitsProcessor(1.7),
        ]
    )
    actual = adjust(logits, make_adjustments(repetition=1.7, prompt=(5, 6, 7), biases=biases))
    torch.testing.assert_close(actual, processors(ids, logits.clone()), rtol=1e-6, atol=0)


def test_presence_and_frequency_are_the_formula_of_openai() -> None:
    """mu[j] - c[j] * frequency - (c[j] > 0) * presence, c[j] being how often j was sampled before."""
    logits = make_logits(1)
    completion = (3, 3, 3, 9)
    mu = logits[0].tolist()
    expected = [
        mu[j] - completion.count(j) * 0.25 - float(completion.count(j) > 0) * 0.5 if j in (3, 9) else mu[j]
        for j in range(VOCAB_SIZE)
    ]
    actual = adjust(logits, make_adjustments(presence=0.5, frequency=0.25, prompt=(4, 9), completion=completion))
    torch.testing.assert_close(actual[0].tolist(), expected, rtol=1e-6, atol=1e-6)


def test_banned_tokens_stay_banned_whatever_the_penalties() -> None:
    banned = {token: float("-inf") for token in (4, 5)}
    settings = make_adjustments(repetition=0.1, presence=-2.0, frequency=-2.0, completion=(4, 4), biases=banned)
    assert adjust(make_logits(1), settings)[0, [4, 5]].tolist() == [float("-inf")] * 2
