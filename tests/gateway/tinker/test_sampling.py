"""What the real SDK gets of `sample` and `compute_logprobs`, against transformers and PEFT on the same checkpoint."""

from __future__ import annotations

import pytest
import tinker
import torch
from tinker import types

from tests.gateway.tinker.conftest import NUM_TOKENS, PROMPT, WAIT_S, Served, model_input, params, tokens_of

# Natural logarithm: sums of another order in float32; tests/e2e/test_served_decoding.py has the same.
TOLERANCE = 1e-4


def logprobs_of(served: Served, tokens: list[int], adapter: str, temperature: float = 1.0) -> torch.Tensor:
    """[len(tokens), vocabulary]: of what follows each of the tokens."""
    return (served.oracle.logits(tokens, adapter) / temperature).log_softmax(-1)


@pytest.mark.parametrize("adapter", ["legal", "medical", ""])
def test_greedy_tokens_are_those_of_peft(served: Served, adapter: str) -> None:
    if adapter:
        sampler = served.sampler(f"tinker://{adapter}")
    else:
        sampler = served.service.create_sampling_client(base_model="test/tiny").result(WAIT_S)
    expected = served.oracle.greedy(PROMPT, NUM_TOKENS, adapter)
    assert expected.is_decisive and tokens_of(sampler) == list(expected.token_ids)
    assert sampler.get_base_model() == "test/tiny"


def test_prompt_logprobs_are_those_of_peft(served: Served) -> None:
    sampler = served.sampler("tinker://legal@1")
    expected = logprobs_of(served, PROMPT, "legal")[:-1]
    scored = expected[range(len(PROMPT) - 1), PROMPT[1:]].tolist()
    first, *others = sampler.compute_logprobs(model_input(PROMPT)).result(WAIT_S)
    assert first is None and others == pytest.approx(scored, abs=TOLERANCE)
    last = sampler.compute_logprobs(model_input(PROMPT), prompt_logprobs_last_n=3).result(WAIT_S)
    assert last[:-3] == [None] * (len(PROMPT) - 3) and last[-3:] == pytest.approx(scored[-3:], abs=TOLERANCE)
    assert sampler.compute_logprobs(model_input(PROMPT[:1])).result(WAIT_S) == [None]


def test_the_most_likely_tokens_of_prompt_and_sample_are_those_of_peft(served: Served) -> None:
    sampler = served.sampler("tinker://legal")
    response = sampler.sample(
        *(model_input(PROMPT), 1, params()),
        include_prompt_logprobs=True,
        topk_prompt_logprobs=3,
        topk_sample_logprobs=2,
    ).result(WAIT_S)
    [sequence] = response.sequences
    expected = logprobs_of(served, [*PROMPT, *sequence.tokens], "legal")
    assert response.topk_prompt_logprobs is not None and sequence.topk_logprobs is not None
    assert response.topk_prompt_logprobs[0] is None, "nothing is before the first token"
    for shown, row in zip(response.topk_prompt_logprobs[1:], expected, strict=False):
        assert shown is not None
        assert [logprob for _, logprob in shown] == pytest.approx(row.topk(3).values.tolist(), abs=TOLERANCE)
    for top, row in zip(sequence.topk_logprobs, expected[len(PROMPT) - 1 :], strict=False):
        assert top is not None and top[0][0] == int(row.argmax())
        assert [logprob for _, logprob in top] == pytest.approx(row.topk(2).values.tolist(), abs=TOLERANCE)


@pytest.mark.parametrize("temperature", [0.7, 1.0])
def test_logprobs_of_samples_are_of_what_was_drawn_from_and_those_of_the_prompt_are_the_models_own(
    served: Served, temperature: float
) -> None:
    sampling = params(temperature=temperature, seed=5)
    sampler = served.sampler("tinker://medical")
    response = sampler.sample(model_input(PROMPT), 2, sampling, include_prompt_logprobs=True).result(WAIT_S)
    for sequence in response.sequences:
        rows = logprobs_of(served, [*PROMPT, *sequence.tokens], "medical", temperature)[len(PROMPT) - 1 : -1]
        assert sequence.logprobs == pytest.approx(rows[range(NUM_TOKENS), sequence.tokens].tolist(), abs=TOLERANCE)
    assert response.prompt_logprobs is not None
    scored = logprobs_of(served, PROMPT, "medical")[range(len(PROMPT) - 1), PROMPT[1:]].tolist()
    assert response.prompt_logprobs[1:] == pytest.approx(scored, abs=TOLERANCE)


def test_top_k_and_top_p_bound_what_is_drawn_and_are_in_its_logprobs(served: Served) -> None:
    sampler = served.sampler("tinker://legal")
    response = sampler.sample(model_input(PROMPT), 3, params(temperature=1.0, top_k=1, seed=1)).result(WAIT_S)
    for sequence in response.sequences:
        assert list(sequence.tokens) == tokens_of(sampler)
        assert sequence.logprobs == pytest.approx([0.0] * NUM_TOKENS, abs=TOLERANCE), "nothing else could be drawn"


def test_a_seed_gives_the_same_samples_and_each_sample_is_another(served: Served) -> None:
    sampler = served.sampler("tinker://legal")

    def drawn(seed: int | None) -> tuple[tuple[int, ...], ...]:
        response = sampler.sample(model_input(PROMPT), 3, params(temperature=1.0, seed=seed)).result(WAIT_S)
        assert len({sequence.sequence_id for sequence in response.sequences}) == 3
        return tuple(tuple(sequence.tokens) for sequence in response.sequences)

    assert drawn(7) == drawn(7) and len(set(drawn(7))) == 3
    assert drawn(7) != drawn(8) and drawn(None) != drawn(None)
    direct = served.client.generate(
        PROMPT, adapter="legal", n=3, max_tokens=NUM_TOKENS, temperature=1.0, seed=7, ignore_eos=True
    ).result()
    assert drawn(7) == tuple(completion.token_ids for completion in direct.completions)


def test_a_sample_ends_with_its_stop_token_or_behind_its_stop_string(served: Served) -> None:
    sampler = served.sampler("tinker://legal")
    tokens = tokens_of(sampler)
    ended = sampler.sample(model_input(PROMPT), 1, params(stop=[tokens[3]])).result(WAIT_S).sequences[0]
    assert ended.stop_reason == "stop" and ended.tokens == tokens[: tokens.index(tokens[3]) + 1]
    assert len(ended.logprobs or []) == len(ended.tokens)
    open_ended = sampler.sample(model_input(PROMPT), 1, params()).result(WAIT_S).sequences[0]
    assert open_ended.stop_reason == "length"
    drawn = params(temperature=1.5, seed=2, max_tokens=40)
    long = sampler.sample(model_input(PROMPT), 1, drawn).result(WAIT_S).sequences[0].tokens
    text = served.client.generate(
        PROMPT, adapter="legal", max_tokens=40, temperature=1.5, seed=2, ignore_eos=True
    ).text()
    letter = next(letter for letter in text if letter.isascii() and letter.isalnum())
    for stop in (letter, [letter]):
        stopping = params(temperature=1.5, seed=2, max_tokens=40, stop=stop)
        stopped = sampler.sample(model_input(PROMPT), 1, stopping).result(WAIT_S).sequences[0]
        assert stopped.stop_reason == "stop" and 0 < len(stopped.tokens) < 40
        assert stopped.tokens == long[: len(stopped.tokens)]


def test_without_max_tokens_a_sample_goes_on_to_the_end_of_the_context(served: Served) -> None:
    assert len(tokens_of(served.sampler("tinker://legal"), max_tokens=None)) == 64 - len(PROMPT)


def test_chunks_of_a_prompt_are_one_prompt(served: Served) -> None:
    sampler = served.sampler("tinker://legal")
    parts = [types.EncodedTextChunk(tokens=PROMPT[:4]), types.EncodedTextChunk(tokens=PROMPT[4:])]
    response = sampler.sample(types.ModelInput(chunks=list(parts)), 1, params()).result(WAIT_S)
    assert list(response.sequences[0].tokens) == tokens_of(sampler)


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"temperature": -1.0}, "sampling.temperature"),
        ({"top_k": 0}, "sampling.top_k"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"seed": -3}, "sampling.seed"),
        ({"max_tokens": 1000}, "max_tokens"),
    ],
)
def test_a_value_that_motet_refuses_fails_the_sample_and_is_named(
    served: Served, more: dict[str, object], said: str
) -> None:
    future = served.sampler("tinker://legal").sample(model_input(PROMPT), 1, params(**more))
    with pytest.raises(tinker.RequestFailedError, match=said) as raised:
        future.result(WAIT_S)
    assert raised.value.category == "user"


def test_what_the_protocol_has_and_motet_has_not_is_refused_by_name(served: Served) -> None:
    sampler = served.sampler("tinker://legal")
    target = types.TensorData(data=[1] * (len(PROMPT) - 1), dtype="int64", shape=[len(PROMPT) - 1, 1])
    refused: list[tuple[str, dict[str, object]]] = [
        ("target_prompt_logprobs", {"target_prompt_logprobs": target}),
        ("prompt_alt_tokens_k", {"prompt_alt_tokens_k": 2}),
        ("topk_sample_logprobs", {"topk_sample_logprobs": -1}),
    ]
    for name, arguments in refused:
        with pytest.raises(tinker.BadRequestError, match=name):
            sampler.sample(model_input(PROMPT), 1, params(), **arguments).result(WAIT_S)  # type: ignore[arg-type]
    with pytest.raises(tinker.BadRequestError, match="prompt: is empty"):
        sampler.sample(types.ModelInput.empty(), 1, params()).result(WAIT_S)
    image = types.ImageChunk(data=b"\x89PNG", format="png", expected_tokens=2)
    with pytest.raises(tinker.BadRequestError, match="'image' is not served"):
        sampler.sample(types.ModelInput(chunks=[image]), 1, params()).result(WAIT_S)


def test_training_is_refused_with_the_word_what_to_do_instead(served: Served) -> None:
    with pytest.raises(tinker.BadRequestError, match=r"create_model: Motet serves .* PushVersion"):
        served.service.create_lora_training_client(base_model="test/tiny").result(WAIT_S)
