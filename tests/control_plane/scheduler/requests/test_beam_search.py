"""The beam search algorithm against transformers' own, token for token, on small random models."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from control_plane.scheduler.requests.beam_search import BeamSearcher, Hypothesis
from control_plane.scheduler.types import BeamSearch

VOCAB_SIZE = 40


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    torch.manual_seed(5)
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=64,
        initializer_range=0.3,  # the usual 0.02 makes all tokens alike
    )
    return LlamaForCausalLM(config).double().eval()


def searched(model: LlamaForCausalLM, prompt: list[int], searcher: BeamSearcher) -> list[Hypothesis]:
    """The search over the model's log-probabilities, all of every beam computed anew in each step."""
    while searcher.beams:
        rows = torch.tensor([[*prompt, *beam.token_ids] for beam in searcher.beams])
        logprobs = torch.log_softmax(model(rows).logits[:, -1].float(), dim=-1)
        top = logprobs.topk(min(searcher.num_candidates, VOCAB_SIZE))
        searcher.advance(
            [zip(*pair, strict=True) for pair in zip(top.indices.tolist(), top.values.tolist(), strict=True)]
        )
    return searcher.hypotheses


def generated(
    model: LlamaForCausalLM,
    prompt: list[int],
    search: BeamSearch,
    stop_ids: list[int],
    min_tokens: int,
    max_tokens: int,
) -> list[tuple[tuple[int, ...], float]]:
    """What transformers returns."""
    untyped: Any = model  # the type of `generate` does not fit this class
    output = untyped.generate(
        torch.tensor([prompt]),
        num_beams=search.width,
        num_return_sequences=search.width,
        length_penalty=search.length_penalty,
        early_stopping=search.early_stopping,
        do_sample=False,
        max_new_tokens=max_tokens,
        min_new_tokens=min_tokens or None,
        eos_token_id=stop_ids or None,
        pad_token_id=VOCAB_SIZE,  # no token: it only fills up
        return_dict_in_generate=True,
        output_scores=True,
    )
    rows = output.sequences[:, len(prompt) :].tolist()
    tokens = [tuple(token_id for token_id in row if token_id != VOCAB_SIZE) for row in rows]
    return list(zip(tokens, output.sequences_scores.tolist(), strict=True))


@pytest.mark.parametrize("length_penalty", [-0.5, 1.0, 1.5])
@pytest.mark.parametrize("early_stopping", [False, True])
@pytest.mark.parametrize("width", [2, 5])
@torch.inference_mode()
def test_hypotheses_are_those_of_transformers(
    model: LlamaForCausalLM, width: int, *, early_stopping: bool, length_penalty: float
) -> None:
    search = BeamSearch(width, length_penalty, early_stopping)
    num_ended = 0
    for seed in range(3):
        generator = torch.Generator().manual_seed(seed)
        prompt = torch.randint(0, VOCAB_SIZE, (3 + seed,), generator=generator).tolist()
        # The more stop tokens there are, the more candidates end.
        stop_ids = torch.randperm(VOCAB_SIZE, generator=generator)[: [0, 2, 12][seed]].tolist()
        min_tokens, max_tokens = [0, 0, 3][seed], 8
        searcher = BeamSearcher(
            search, stop_token_ids=frozenset(stop_ids), min_tokens=min_tokens, max_generated=max_tokens
        )
        ours = searched(model, prompt, searcher)
        theirs = generated(model, prompt, search, stop_ids, min_tokens, max_tokens)
        assert [hypothesis.token_ids for hypothesis in ours] == [token_ids for token_ids, _ in theirs]
        assert [hypothesis.score for hypothesis in ours] == pytest.approx([score for _, score in theirs], rel=1e-5)
        num_ended += sum(hypothesis.token_ids[-1] in stop_ids for hypothesis in ours)
    assert num_ended > 0 or length_penalty > 1, "no hypothesis ended with a stop token: half of the case did not occur"


def test_a_beam_may_have_several_children_and_another_none() -> None:
    searcher = BeamSearcher(BeamSearch(2), stop_token_ids=frozenset(), min_tokens=0, max_generated=9)
    assert searcher.advance([[(1, -1.0), (2, -2.0)]]) == [0, 0]
    assert searcher.advance([[(5, -3.0), (6, -3.5)], [(7, -0.5), (8, -0.75)]]) == [1, 1]
    assert [(beam.token_ids, beam.logprob) for beam in searcher.beams] == [((2, 7), -2.5), ((2, 8), -2.75)]


@pytest.mark.parametrize(("logprob", "goes_on"), [(-1.4, False), (-0.8, True)])
def test_a_search_ends_when_its_best_beam_is_worse_at_its_present_length_than_what_ended(
    logprob: float, goes_on: bool
) -> None:
    """As in transformers: not when it would be worse even at the longest length, where 9 tokens divide its score."""
    searcher = BeamSearcher(BeamSearch(2), stop_token_ids=frozenset([9]), min_tokens=0, max_generated=9)
    assert searcher.advance([[(9, -1.0), (1, -1.1), (2, -1.2)]]) == [0, 0]
    parents = searcher.advance([[(9, -0.5), (3, logprob), (4, -9.0)], [(5, -8.0), (6, -8.5), (7, -9.0)]])
    assert searcher.hypotheses == [Hypothesis((1, 9), -0.8), Hypothesis((9,), -1.0)]
    assert parents == ([0, 1] if goes_on else []), "beam (1, 3) scores -1.25 or -0.95"


def test_a_vocabulary_of_stop_tokens_ends_at_once() -> None:
    searcher = BeamSearcher(BeamSearch(2), stop_token_ids=frozenset([1, 2]), min_tokens=0, max_generated=9)
    assert searcher.advance([[(1, -0.5), (2, -1.0)]]) == []
    assert searcher.hypotheses == [Hypothesis((1,), -0.5), Hypothesis((2,), -1.0)]


def test_equal_candidates_are_ranked_by_beam_and_token() -> None:
    searcher = BeamSearcher(BeamSearch(3), stop_token_ids=frozenset(), min_tokens=0, max_generated=9)
    lp = math.log(0.25)
    searcher.advance([[(3, lp), (1, lp), (2, lp)]])
    assert [beam.token_ids for beam in searcher.beams] == [(1,), (2,), (3,)]


def test_many_stop_tokens_cost_nothing_where_none_is_likely() -> None:
    search = BeamSearch(4)
    stop_token_ids = frozenset(range(1000, 1256))
    searcher = BeamSearcher(search, stop_token_ids=stop_token_ids, min_tokens=0, max_generated=9)
    returned = [(token_id, -1.0 - token_id / 100) for token_id in [*range(3), 1000, *range(3, 259)]]
    assert len(returned) == searcher.num_candidates
    unread = [iter(returned)]
    assert searcher.advance(list(unread)) == [0, 0, 0, 0]
    assert [beam.token_ids for beam in searcher.beams] == [(0,), (1,), (2,), (3,)]
    assert len(list(unread[0])) == len(returned) - 5, "four go on, one ends before the last of them"
