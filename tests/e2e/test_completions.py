"""Several completions, ranked completions, beams and log-probabilities, from the SDK to a worker and back.

The worker's model is a hash chain whose sampler draws by seed, so that every completion is known beforehand.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import pytest
from motet import BeamSearch, Client, FinishReason, Generation

from contract.fingerprint import checkpoint_fingerprint
from control_plane.scheduler.types import sample_seed
from tests.e2e.harness import System
from tests.fakes import hash_model
from tests.makers import EOS_TOKEN_ID, make_checkpoint, make_tokenizer

PROMPT = [9, 10, 11, 12, 13, 14]  # a block and a half


@dataclass(frozen=True)
class Served:
    client: Client
    fingerprint: str
    vocab_size: int

    def tokens(self, num_tokens: int, **sampling: object) -> list[int]:
        """What a correct system returns for PROMPT."""
        oracle = partial(hash_model.oracle, self.fingerprint, "", PROMPT, vocab_size=self.vocab_size)
        return oracle(num_tokens, **sampling)  # type: ignore[arg-type]

    def logprobs(self, known: list[int], completion: list[int]) -> list[float]:
        """Log-probabilities of the tokens that follow those known."""
        value = hash_model.chain_start(self.fingerprint, "")
        for token in known:
            value = hash_model.chain_next(value, token)
        returned = []
        for token in completion:
            returned.append(hash_model.logprob_of(value, token, self.vocab_size)[0])
            value = hash_model.chain_next(value, token)
        return returned

    def generate(self, **options: object) -> Generation:
        defaults = {"max_tokens": 12, "ignore_eos": True, "temperature": 0.8, "seed": 5}
        defaults["timeout_s"] = 20.0
        return self.client.generate(PROMPT, **{**defaults, **options}).result()  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    directory = tmp_path_factory.mktemp("system")
    model_dir = make_tokenizer(make_checkpoint(directory / "model", arch="llama"))
    with System(model_dir, directory) as system:
        system.start_hash_worker("w0", ["--num-blocks", "128", "--block-size", "4", "--max-rows", "12"])
        client = system.client()
        yield Served(client, checkpoint_fingerprint(model_dir), client.status().model.vocab_size)


def test_samples_are_those_of_their_seeds(served: Served) -> None:
    result = served.generate(n=4)
    assert [completion.index for completion in result.completions] == [0, 1, 2, 3]
    for completion in result.completions:
        seed = sample_seed(5, completion.index)
        assert completion.finished.seed == seed
        assert list(completion.token_ids) == served.tokens(12, seed=seed)
        assert list(completion.token_ids) == list(served.generate(seed=seed).token_ids)
        assert (completion.finished.finish_reason, completion.finished.usage.completion_tokens) == (
            FinishReason.LENGTH,
            12,
        )
    assert len({completion.token_ids for completion in result.completions}) == 4


def test_stop_token_and_stop_string_end_one_completion_alone(served: Served) -> None:
    whole = served.generate(n=3)
    stop_token = whole.completions[1].token_ids[4]
    ended = served.generate(n=3, stop_token_ids=[stop_token])
    for before, after in zip(whole.completions, ended.completions, strict=True):
        num_tokens = before.token_ids.index(stop_token) + 1 if stop_token in before.token_ids else 12
        assert after.token_ids == before.token_ids[:num_tokens]
    stop = whole.completions[2].text[6:9]
    ended = served.generate(n=3, stop=stop)
    for before, after in zip(whole.completions, ended.completions, strict=True):
        head, found, _ = before.text.partition(stop)
        assert after.text == head
        assert after.finished.finish_reason is (FinishReason.STOP_STRING if found else FinishReason.LENGTH)
    status = served.client.status()
    assert (status.queues.num_requests, status.workers[0].num_blocks_held) == (0, 0)


def test_best_of_returns_the_most_likely_ones(served: Served) -> None:
    def mean_logprob(tokens: list[int]) -> float:
        return math.fsum(served.logprobs(PROMPT, tokens)) / len(tokens)

    samples = [served.tokens(12, seed=sample_seed(5, index)) for index in range(6)]
    ranked = sorted(samples, key=mean_logprob, reverse=True)
    result = served.generate(n=2, best_of=6)
    assert [list(completion.token_ids) for completion in result.completions] == ranked[:2]
    assert result.completions[0].logprobs == () and result.completions[0].finished.cumulative_logprob is None
    assert result.completions[0].finished.seed == sample_seed(5, samples.index(ranked[0]))


def test_min_tokens_holds_off_the_end(served: Served) -> None:
    seed = next(s for s in range(100) if any(token == EOS_TOKEN_ID for token in served.tokens(8, seed=s)))
    banned = [EOS_TOKEN_ID, *range(20)]
    expected = served.tokens(12, seed=seed, min_tokens=10, banned=banned)
    num_tokens = next((i + 1 for i, token in enumerate(expected) if token in banned), 12)
    assert num_tokens > 10
    result = served.generate(seed=seed, min_tokens=10, stop_token_ids=list(range(20)), ignore_eos=False)
    assert list(result.token_ids) == expected[:num_tokens]


def test_log_probabilities_of_prompt_and_completion(served: Served) -> None:
    result = served.generate(n=2, logprobs=3, prompt_logprobs=0)
    prompt = result.started.prompt_logprobs
    assert [returned.token_id for returned in prompt] == PROMPT[1:]
    assert [returned.logprob for returned in prompt] == pytest.approx(served.logprobs(PROMPT[:1], PROMPT[1:]))
    assert result.started.cached_tokens == 0
    for completion in result.completions:
        assert [returned.token_id for returned in completion.logprobs] == list(completion.token_ids)
        expected = served.logprobs(PROMPT, list(completion.token_ids))
        assert [returned.logprob for returned in completion.logprobs] == pytest.approx(expected)
        assert completion.finished.cumulative_logprob == pytest.approx(math.fsum(expected))
        for returned in completion.logprobs:
            assert len(returned.top) == 3 and returned.rank >= 1
            assert returned.rank > 3 or returned.top[returned.rank - 1].token_id == returned.token_id


def test_beams_are_returned_best_first_with_their_scores(served: Served) -> None:
    result = served.generate(temperature=None, n=3, beam_search=BeamSearch(4, length_penalty=0.5))
    scores = []
    for completion in result.completions:
        total = math.fsum(served.logprobs(PROMPT, list(completion.token_ids)))
        assert completion.finished.cumulative_logprob == pytest.approx(total)
        assert completion.finished.score == pytest.approx(total / len(completion.token_ids) ** 0.5)
        scores.append(completion.finished.score or 0.0)
    assert (
        scores == sorted(scores, reverse=True) and len({completion.token_ids for completion in result.completions}) == 3
    )
    assert result.started.beam_search == BeamSearch(4, 0.5, early_stopping=False)
    status = served.client.status()
    assert (status.queues.num_requests, status.workers[0].num_blocks_held) == (0, 0)


def test_tenant_and_priority_are_taken_and_the_use_is_the_hosts(served: Served) -> None:
    """The operator names no tenants, so all names of one host are one."""

    def use() -> tuple[int, int]:
        tenants = {tenant.tenant: tenant for tenant in served.client.status().tenants}
        assert list(tenants) == ["ipv4:127.0.0.1"]
        return tenants["ipv4:127.0.0.1"].num_accepted, tenants["ipv4:127.0.0.1"].num_generated_tokens

    served.generate()
    num_accepted, num_tokens = use()
    assert served.generate(tenant="team-a", priority=7).started.tenant == "team-a"
    assert use() == (num_accepted + 1, num_tokens + 12)
