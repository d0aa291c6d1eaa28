"""Log-probabilities of what tokens are drawn from, and the model's own, against transformers' `scores` and `logits`."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from motet.v1 import types_pb2
from transformers import AutoModelForCausalLM

from data_plane.engine.engine import TorchEngine
from data_plane.engine.sampling.logprobs import LEAST_LOGPROB
from data_plane.errors import PlanRefused
from data_plane.plan import RowLogprobs, RowSampling
from tests.data_plane.engine.planner import array, make_plan
from tests.data_plane.engine.test_engine import PROMPT, new_row

NUM_TOKENS, NUM_TOP = 6, 5
PROCESSED = types_pb2.LOGPROBS_MODE_PROCESSED
SAMPLED = RowSampling(
    temperature=0.7, top_k=20, top_p=0.9, min_p=0.01, seed=11, repetition_penalty=1.8, num_logprobs=NUM_TOP
)
GREEDY = RowSampling(repetition_penalty=3.0, num_logprobs=NUM_TOP)


@pytest.fixture(scope="module")
def model(checkpoint: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)


def distributions(model: Any, tokens: list[int], **settings: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """transformers' raw and processed log-probabilities [vocab] of the token behind these ones."""
    output = model.generate(
        torch.tensor([tokens]),
        attention_mask=torch.ones(1, len(tokens), dtype=torch.int64),
        max_new_tokens=1,
        pad_token_id=0,
        eos_token_id=None,
        return_dict_in_generate=True,
        output_scores=True,
        output_logits=True,
        **settings,
    )
    return output.logits[0][0].double().log_softmax(-1), output.scores[0][0].double().log_softmax(-1)


def served(engine: TorchEngine, settings: list[RowSampling]) -> list[list[RowLogprobs]]:
    """What each row returns, token by token; the rows run beside each other."""
    rows = [
        new_row(row, block_ids=array(range(4 * row, 4 * row + 4)), sampling=sampling)
        for row, sampling in enumerate(settings)
    ]
    outputs = [engine.execute(make_plan(1, new=rows, prefills=[(row, len(PROMPT)) for row in range(len(rows))]))]
    outputs += [engine.execute(make_plan(step)) for step in range(2, NUM_TOKENS + 1)]
    return [[part for out in outputs for part in out.sampled_logprobs if part.row == row] for row in range(len(rows))]


def check(returned: list[RowLogprobs], expected_at: Any) -> None:
    """Every token against the distribution that `expected_at` has for the tokens before it."""
    tokens = list(PROMPT)
    assert len(returned) == NUM_TOKENS
    for part in returned:
        expected = expected_at(tokens)
        token = int(part.token_ids[0])
        assert part.logprobs[0] == pytest.approx(expected[token].item(), abs=1e-4)
        assert part.ranks[0] == (expected > expected[token]).sum() + 1
        num_kept = min(NUM_TOP, int(expected.isfinite().sum()))
        top = expected.topk(num_kept)
        assert part.top_token_ids[0, :num_kept].tolist() == top.indices.tolist()
        assert part.top_logprobs[0, :num_kept] == pytest.approx(top.values.tolist(), abs=1e-4)
        assert (part.top_logprobs[0, num_kept:] == LEAST_LOGPROB).all()
        tokens.append(token)


def test_processed_and_raw_rows_of_one_batch_are_those_of_transformers(engine: TorchEngine, model: Any) -> None:
    drawn = {"do_sample": True, "temperature": 0.7, "top_k": 20, "top_p": 0.9, "min_p": 0.01, "repetition_penalty": 1.8}
    greedy = {"do_sample": False, "repetition_penalty": 3.0}
    modes = [replace(sampling, logprobs_mode=PROCESSED) for sampling in (SAMPLED, GREEDY)]
    muted = replace(SAMPLED, num_logprobs=None, logprobs_mode=PROCESSED)
    results = served(engine, [SAMPLED, modes[0], muted, GREEDY, modes[1]])
    assert results[2] == []
    tokens = [[int(part.token_ids[0]) for part in result] for result in results]
    assert tokens[0] == tokens[1] and tokens[3] == tokens[4], "the mode changes what is reported, not what is drawn"
    assert results[0][1].logprobs[0] != pytest.approx(results[1][1].logprobs[0], abs=1e-3)
    check(results[0], lambda known: distributions(model, known, **drawn)[0])
    check(results[1], lambda known: distributions(model, known, **drawn)[1])
    check(results[3], lambda known: distributions(model, known, **greedy)[0])
    check(results[4], lambda known: distributions(model, known, **greedy)[1])


def test_banned_tokens_have_no_processed_probability(engine: TorchEngine) -> None:
    banned = array(sorted(set(range(256)) - {7, 9}))
    sampling = RowSampling(num_logprobs=4, logprobs_mode=PROCESSED, min_tokens=2, banned_token_ids=banned)
    (returned,) = served(engine, [sampling])
    for part in returned[:2]:
        assert set(part.top_token_ids[0, :2].tolist()) == {7, 9}
        assert np.exp(part.top_logprobs[0, :2].astype(np.float64)).sum() == pytest.approx(1.0)
        assert (part.top_logprobs[0, 2:] == LEAST_LOGPROB).all()
    assert (returned[2].top_logprobs > LEAST_LOGPROB).all()


def test_an_unknown_mode_is_refused_by_name(engine: TorchEngine) -> None:
    with pytest.raises(PlanRefused, match="logprobs_mode 3"):
        engine.execute(make_plan(new=[new_row(sampling=replace(GREEDY, logprobs_mode=3))]))
