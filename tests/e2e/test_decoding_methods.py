"""Samples and beam searches of the served system equal transformers + PEFT, all at once in too small a KV cache.

Some share a prefix, and forks and beams take most of the rows: blocks are shared, copied, dropped, preempted and found
again all the time. Steps carry 7 tokens; other sizes, other policies and swaps are test_scheduled_engine.py's.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import pytest
from motet import BeamSearch, Client, Completion, FinishReason

from tests.e2e.harness import System
from tests.e2e.traffic import prompts
from tests.makers import make_adapter, make_checkpoint
from tests.oracle import Oracle

ADAPTERS = ["", "one"]
SHARED = prompts([13], vocab_size=256, seed=5)[0]
PROMPTS = [*prompts([3, 17], vocab_size=256, seed=11), (*SHARED, 30), (*SHARED, 40, 41)]
JOBS = list(itertools.product(PROMPTS, ADAPTERS))
SEARCHES = [BeamSearch(4, 1.0, False), BeamSearch(3, -0.5, True), BeamSearch(2, 2.0, False)]
NUM_TOKENS = 12
TOLERANCE = 1e-4  # sums of another order differ by 1e-5 here
# 20 blocks of 4 tokens: a group of four takes up to 16 of them.
WORKER_FLAGS = ["--dtype", "float32", "--block-size", "4", "--num-blocks", "20", "--max-rows", "12"]
WORKER_FLAGS += ["--max-model-len", "64", "--num-slots", "2", "--arena-bytes", "64MiB", "--token-budget", "7"]


@dataclass(frozen=True)
class Served:
    """A running system with one worker, and the truth about its model."""

    client: Client
    oracle: Oracle


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    directory = tmp_path_factory.mktemp("system")
    checkpoint = make_checkpoint(directory / "model", arch="llama")
    adapter = make_adapter(directory / "adapter", checkpoint, rank=8, alpha=16, targets=["q_proj", "down_proj"], seed=2)
    with System(checkpoint, directory) as system:
        client = system.client()
        client.adapters.register("one", adapter)
        system.start_worker(flags=WORKER_FLAGS)
        yield Served(client, Oracle(checkpoint, {"one": adapter}))


@pytest.mark.slow
def test_every_sample_sees_its_own_tokens_alone(served: Served) -> None:
    """The log-probability of each token is the model's after the prompt and the tokens of the same sample."""

    def ask(job: tuple[tuple[int, ...], str], mode: str = "raw") -> tuple[Completion, ...]:
        prompt, adapter = job
        stream = served.client.generate(
            list(prompt),
            adapter=adapter,
            n=4,
            max_tokens=NUM_TOKENS,
            ignore_eos=True,
            temperature=0.9,
            seed=3,
            logprobs=1,
            logprobs_mode=mode,
            timeout_s=120.0,
        )
        return stream.result().completions

    with ThreadPoolExecutor(len(JOBS)) as pool:
        results = list(pool.map(ask, JOBS))
    results += [ask(JOBS[-1]), ask(JOBS[-1])]  # the last one finds its prompt's blocks
    for (prompt, adapter), completions in zip([*JOBS, JOBS[-1], JOBS[-1]], results, strict=True):
        assert len({completion.token_ids for completion in completions}) == 4, "samples of one seed are alike"
        for completion in completions:
            logprobs = served.oracle.logits((*prompt, *completion.token_ids), adapter)[
                len(prompt) - 1 : -1
            ].log_softmax(-1)
            assert [returned.token_id for returned in completion.logprobs] == list(completion.token_ids)
            expected = [float(row[token]) for row, token in zip(logprobs, completion.token_ids, strict=True)]
            assert [returned.logprob for returned in completion.logprobs] == pytest.approx(expected, abs=TOLERANCE)
    (prompt, adapter), raw = JOBS[0], results[0]
    for completion, other in zip(ask(JOBS[0], "processed"), raw, strict=True):
        assert completion.token_ids == other.token_ids
        scores = served.oracle.logits((*prompt, *completion.token_ids), adapter)[len(prompt) - 1 : -1] / 0.9
        expected = scores.log_softmax(-1)[range(NUM_TOKENS), completion.token_ids].tolist()
        assert [returned.logprob for returned in completion.logprobs] == pytest.approx(expected, abs=TOLERANCE)
        assert completion.finished.cumulative_logprob == pytest.approx(sum(expected), abs=1e-3)
    status = served.client.status().workers[0]
    assert status.num_blocks_held == 0 and status.prefix_hit_tokens > 0 and status.num_preemptions > 0


@pytest.mark.slow
def test_hypotheses_of_a_beam_search_are_those_of_transformers(served: Served) -> None:
    # A likely token ends the search: some hypotheses end early, others run to the end.
    liked = [served.oracle.logits(prompt, adapter)[-1].topk(4).indices.tolist() for prompt, adapter in JOBS]
    searches = [(*job, SEARCHES[idx % 3], liked[idx][idx % 4]) for idx, job in enumerate(JOBS)]

    def ask(search: tuple[tuple[int, ...], str, BeamSearch, int]) -> tuple[Completion, ...]:
        prompt, adapter, beam, stop = search
        stream = served.client.generate(
            list(prompt),
            adapter=adapter,
            n=beam.width,
            beam_search=beam,
            max_tokens=NUM_TOKENS,
            ignore_eos=True,
            stop_token_ids=[stop],
            timeout_s=120.0,
        )
        return stream.result().completions

    with ThreadPoolExecutor(len(searches)) as pool:
        results = list(pool.map(ask, searches))
    num_ended = num_whole = 0
    for search, completions in zip(searches, results, strict=True):
        prompt, adapter, beam, stop = search
        assert beam.length_penalty is not None and beam.early_stopping is not None
        expected = served.oracle.beams(
            prompt,
            adapter,
            beam.width,
            beam.length_penalty,
            beam.early_stopping,
            max_tokens=NUM_TOKENS,
            stop_token_ids=[stop],
        )
        assert [list(completion.token_ids) for completion in completions] == [token_ids for token_ids, _ in expected], (
            search
        )
        scores = [completion.finished.score for completion in completions]
        assert scores == pytest.approx([score for _, score in expected], abs=TOLERANCE), search
        num_ended += sum(completion.finished.finish_reason is FinishReason.STOP_TOKEN for completion in completions)
        num_whole += sum(completion.finished.finish_reason is FinishReason.LENGTH for completion in completions)
    assert num_ended > 0 and num_whole > 0, "every hypothesis ended for the same reason"
    assert served.client.status().workers[0].num_blocks_held == 0
