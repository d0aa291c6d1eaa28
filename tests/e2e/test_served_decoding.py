"""Beams, penalties, log-probabilities and swapped requests of the served system equal those of transformers + PEFT."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import pytest
import torch
from motet import BeamSearch, Client, Generation, TokenLogprobs

from tests.e2e.harness import System
from tests.e2e.traffic import prompts
from tests.makers import make_adapter, make_checkpoint
from tests.oracle import MIN_GAP, Oracle

PROMPTS = prompts([3, 9, 17], vocab_size=256, seed=11)
STOPS = [5, 60, 61, 62, 63, 64, 65, 66]
# Fewer blocks than many requests at once need: some are swapped to host memory, which costs next to nothing.
WORKER_FLAGS = ["--dtype", "float32", "--block-size", "4", "--num-blocks", "60", "--max-rows", "12"]
WORKER_FLAGS += ["--max-model-len", "128", "--arena-bytes", "64MiB", "--host-kv-bytes", "4MiB"]
CONTROL_FLAGS = ["--swap-us-per-block", "0.1"]


@dataclass(frozen=True)
class Served:
    client: Client
    oracle: Oracle


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    directory = tmp_path_factory.mktemp("system")
    checkpoint = make_checkpoint(directory / "model", arch="llama")
    adapter = make_adapter(directory / "adapter", checkpoint, rank=8, alpha=16, targets=["q_proj", "down_proj"], seed=2)
    with System(checkpoint, directory, control_flags=CONTROL_FLAGS) as system:
        client = system.client()
        client.adapters.register("one", adapter)
        system.start_worker(flags=WORKER_FLAGS)
        yield Served(client, Oracle(checkpoint, {"one": adapter}))


def assert_logprobs(
    returned: Sequence[TokenLogprobs], token_ids: Sequence[int], logits: torch.Tensor, num_top: int
) -> None:
    """`logits` are those that the tokens were chosen from, one row each."""
    assert [entry.token_id for entry in returned] == list(token_ids)
    logprobs = logits.log_softmax(-1)
    for entry, row in zip(returned, logprobs, strict=True):
        assert entry.logprob == pytest.approx(float(row[entry.token_id]), abs=1e-4)
        assert abs(entry.rank - 1 - int((row > row[entry.token_id]).sum())) <= int(
            ((row - row[entry.token_id]).abs() < MIN_GAP).sum() - 1
        )
        best = row.topk(num_top)
        assert [candidate.logprob for candidate in entry.top] == pytest.approx(best.values.tolist(), abs=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("adapter", ["", "one"])
def test_log_probabilities_are_the_models_own(served: Served, adapter: str) -> None:
    for prompt in PROMPTS:
        result = served.client.generate(
            list(prompt),
            adapter=adapter,
            n=2,
            max_tokens=8,
            ignore_eos=True,
            temperature=0.7,
            repetition_penalty=1.5,
            logprobs=4,
            prompt_logprobs=2,
            timeout_s=120.0,
        ).result()
        num_prompt = len(prompt)
        for completion in result.completions:
            logits = served.oracle.logits([*prompt, *completion.token_ids], adapter)
            assert_logprobs(completion.logprobs, completion.token_ids, logits[num_prompt - 1 : -1], 4)
        assert_logprobs(result.started.prompt_logprobs, prompt[1:], logits[: num_prompt - 1], 2)


@pytest.mark.slow
@pytest.mark.parametrize("adapter", ["", "one"])
def test_penalties_and_bias_change_the_greedy_choice_as_they_should(served: Served, adapter: str) -> None:
    bias = {40: 0.5, 41: -100.0, 42: 1.0}
    num_compared = 0
    for prompt in PROMPTS:
        result = served.client.generate(
            list(prompt),
            adapter=adapter,
            max_tokens=10,
            ignore_eos=True,
            repetition_penalty=1.3,
            presence_penalty=0.4,
            frequency_penalty=0.3,
            logit_bias=bias,
            timeout_s=120.0,
        ).result()
        tokens = list(prompt)
        for token in result.token_ids:
            row = served.oracle.logits(tokens, adapter)[-1]
            seen = torch.tensor(sorted(set(tokens)))
            row[seen] = torch.where(row[seen] > 0, row[seen] / 1.3, row[seen] * 1.3)
            for generated in tokens[len(prompt) :]:
                row[generated] -= 0.3
            for generated in set(tokens[len(prompt) :]):
                row[generated] -= 0.4
            for biased, amount in bias.items():
                row[biased] += amount
            best = row.topk(2)
            if float(best.values[0] - best.values[1]) >= MIN_GAP:
                num_compared += 1
                assert token == int(best.indices[0]), (len(prompt), len(tokens))
            tokens.append(token)
    assert num_compared >= 20


@pytest.mark.slow
def test_swapped_requests_generate_as_transformers(served: Served) -> None:
    num_tokens, num_compared = 30, 0
    texts = prompts(range(3, 19), vocab_size=256, seed=3)

    def ask(position: int) -> Generation:
        return served.client.generate(
            list(texts[position]),
            adapter="one" if position % 2 else "",
            n=1 + position % 3,
            max_tokens=num_tokens,
            ignore_eos=True,
            timeout_s=120.0,
        ).result()

    with ThreadPoolExecutor(len(texts)) as pool:
        results = list(pool.map(ask, range(len(texts))))
    for position, (prompt, result) in enumerate(zip(texts, results, strict=True)):
        (token_ids,) = {completion.token_ids for completion in result.completions}  # greedy: all alike
        assert len(token_ids) == num_tokens
        num_compared += served.oracle.num_agreed(prompt, token_ids, "one" if position % 2 else "")
    assert num_compared > 300
    worker = served.client.status().workers[0]
    assert worker.num_swapped_out > 0 and (worker.num_blocks_held, worker.num_host_blocks_held) == (0, 0)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("adapter", "width", "length_penalty", "early_stopping"),
    [("", 2, 1.0, False), ("one", 4, 0.0, True), ("one", 5, -1.0, False), ("", 3, 2.0, True)],
)
def test_beams_are_those_of_transformers(
    served: Served, adapter: str, width: int, length_penalty: float, early_stopping: bool
) -> None:
    num_compared = 0
    for prompt in PROMPTS:
        result = served.client.generate(
            list(prompt),
            adapter=adapter,
            n=width,
            beam_search=BeamSearch(width, length_penalty, early_stopping),
            max_tokens=10,
            min_tokens=2,
            stop_token_ids=STOPS,
            ignore_eos=True,
            timeout_s=120.0,
        ).result()
        expected = served.oracle.beams(
            *(prompt, adapter, width, length_penalty, early_stopping),
            max_tokens=10,
            min_tokens=2,
            stop_token_ids=STOPS,
        )
        scores = [score for _, score in expected]
        assert [completion.finished.score for completion in result.completions] == pytest.approx(scores, abs=1e-3)
        gaps = [a - b for a, b in itertools.pairwise(scores)]
        if min(gaps) >= MIN_GAP:
            num_compared += 1
            assert [list(completion.token_ids) for completion in result.completions] == [
                tokens for tokens, _ in expected
            ]
    assert num_compared >= 1
