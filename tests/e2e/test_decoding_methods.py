"""Several samples and beam search on a real worker equal transformers + PEFT, in chunks of 1, 7 and 64 tokens.

All requests of a test run at once in a KV cache too small for them, some share a prefix, and forks and beams take
most of the rows: blocks are shared, copied, dropped, preempted and found again all the time.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from motet import Answer, BeamSearch, Client, FinishReason
from peft import PeftModel
from transformers import AutoModelForCausalLM

from tests.e2e.harness import System
from tests.e2e.traffic import prompts
from tests.makers import make_adapter, make_checkpoint

ADAPTERS = ["", "one"]
SHARED = prompts([13], vocab_size=256, seed=5)[0]
PROMPTS = [*prompts([3, 17], vocab_size=256, seed=11), (*SHARED, 30), (*SHARED, 40, 41)]
JOBS = list(itertools.product(PROMPTS, ADAPTERS))
SEARCHES = [BeamSearch(4, 1.0, False), BeamSearch(3, -0.5, True), BeamSearch(2, 2.0, False)]
NUM_TOKENS = 12
PAD = 1_000_000  # no token: it only fills up what transformers returns
TOLERANCE = 1e-4  # sums of another order differ by 1e-5 here
CHUNKS = [1, 7, 64]  # tokens of a step, prefills and decodes together
# 20 blocks of 4 tokens: a group of four takes up to 16 of them.
WORKER_FLAGS = ["--dtype", "float32", "--block-size", "4", "--num-blocks", "20", "--max-rows", "12"]
WORKER_FLAGS += ["--max-model-len", "64", "--num-slots", "2", "--arena-bytes", "64MiB"]


class Truth:
    """What transformers + PEFT say; each question is answered once, for every chunk size asks the same."""

    def __init__(self, model: PeftModel) -> None:
        self._model = model
        self._logits: dict[tuple[object, ...], torch.Tensor] = {}
        self._beams: dict[tuple[object, ...], list[tuple[list[int], float]]] = {}

    def logits(self, token_ids: tuple[int, ...], adapter: str) -> torch.Tensor:
        """[len(token_ids), vocabulary], float32."""
        if (token_ids, adapter) not in self._logits:
            with torch.inference_mode(), _adapter_of(self._model, adapter):
                self._logits[token_ids, adapter] = self._model(input_ids=torch.tensor([token_ids])).logits[0].float()
        return self._logits[token_ids, adapter]

    def beams(
        self, prompt: tuple[int, ...], adapter: str, beam: BeamSearch, stop: int
    ) -> list[tuple[list[int], float]]:
        """Hypotheses with their scores, the best first."""
        key = (prompt, adapter, beam, stop)
        if key not in self._beams:
            with torch.inference_mode(), _adapter_of(self._model, adapter):
                self._beams[key] = self._searched(prompt, beam, stop)
        return self._beams[key]

    def _searched(self, prompt: tuple[int, ...], beam: BeamSearch, stop: int) -> list[tuple[list[int], float]]:
        output = self._model.generate(
            input_ids=torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
            num_beams=beam.width,
            num_return_sequences=beam.width,
            length_penalty=beam.length_penalty,
            early_stopping=beam.early_stopping,
            do_sample=False,
            max_new_tokens=NUM_TOKENS,
            eos_token_id=stop,
            pad_token_id=PAD,
            return_dict_in_generate=True,
            output_scores=True,
        )
        rows = output.sequences[:, len(prompt) :].tolist()
        tokens = [[token_id for token_id in row if token_id != PAD] for row in rows]
        return list(zip(tokens, output.sequences_scores.tolist(), strict=True))


@dataclass(frozen=True)
class Served:
    """A running system with one worker, and the truth about its model."""

    system: System
    client: Client
    truth: Truth
    step_tokens: int = 0  # the worker's token budget


def _adapter_of(model: PeftModel, adapter: str) -> AbstractContextManager[None]:
    return nullcontext() if adapter else model.disable_adapter()


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    directory = tmp_path_factory.mktemp("system")
    checkpoint = make_checkpoint(directory / "model", arch="llama")
    adapter = make_adapter(directory / "adapter", checkpoint, rank=8, alpha=16, targets=["q_proj", "down_proj"], seed=2)
    base = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32, attn_implementation="eager").eval()
    with System(checkpoint, directory) as system:
        client = system.client()
        client.adapters.register("one", Path(adapter))
        yield Served(system, client, Truth(PeftModel.from_pretrained(base, str(adapter)).eval()))


@pytest.fixture(scope="module", params=CHUNKS)
def worker(served: Served, request: pytest.FixtureRequest) -> Iterator[Served]:
    """The system with one worker of this token budget."""
    served.system.start_worker(flags=[*WORKER_FLAGS, "--token-budget", str(request.param)])
    yield replace(served, step_tokens=request.param)
    served.system.workers.pop("w0").stop(timeout_s=15.0)


@pytest.mark.slow
def test_every_sample_sees_its_own_tokens_alone(worker: Served) -> None:
    """The log-probability of each token is the model's after the prompt and the tokens of the same sample."""

    def ask(job: tuple[tuple[int, ...], str]) -> tuple[Answer, ...]:
        prompt, adapter = job
        stream = worker.client.generate(
            list(prompt),
            adapter=adapter,
            n=4,
            max_tokens=NUM_TOKENS,
            ignore_eos=True,
            temperature=0.9,
            seed=3,
            logprobs=1,
            timeout_s=120.0,
        )
        return stream.result().answers

    with ThreadPoolExecutor(len(JOBS)) as pool:
        results = list(pool.map(ask, JOBS))
    results += [ask(JOBS[-1]), ask(JOBS[-1])]  # the last one finds its prompt's blocks
    for (prompt, adapter), answers in zip([*JOBS, JOBS[-1], JOBS[-1]], results, strict=True):
        assert len({answer.token_ids for answer in answers}) == 4, "samples of one seed are alike"
        for answer in answers:
            logprobs = worker.truth.logits((*prompt, *answer.token_ids), adapter)[len(prompt) - 1 : -1].log_softmax(-1)
            assert [told.token_id for told in answer.logprobs] == list(answer.token_ids)
            expected = [float(row[token]) for row, token in zip(logprobs, answer.token_ids, strict=True)]
            assert [told.logprob for told in answer.logprobs] == pytest.approx(expected, abs=TOLERANCE)
    status = worker.client.status().workers[0]
    assert status.num_blocks_held == 0 and status.prefix_hit_tokens > 0
    # With one token a step the first answer runs to its end before the others begin.
    assert (status.num_preemptions > 0) == (worker.step_tokens > 1)


@pytest.mark.slow
def test_hypotheses_of_a_beam_search_are_those_of_transformers(worker: Served) -> None:
    # A likely token ends the search: some hypotheses end early, others run to the end.
    liked = [worker.truth.logits(prompt, adapter)[-1].topk(4).indices.tolist() for prompt, adapter in JOBS]
    searches = [(*job, SEARCHES[idx % 3], liked[idx][idx % 4]) for idx, job in enumerate(JOBS)]

    def ask(search: tuple[tuple[int, ...], str, BeamSearch, int]) -> tuple[Answer, ...]:
        prompt, adapter, beam, stop = search
        stream = worker.client.generate(
            list(prompt),
            adapter=adapter,
            n=beam.width,
            beam_search=beam,
            max_tokens=NUM_TOKENS,
            ignore_eos=True,
            stop_token_ids=[stop],
            timeout_s=120.0,
        )
        return stream.result().answers

    with ThreadPoolExecutor(len(searches)) as pool:
        results = list(pool.map(ask, searches))
    num_ended = num_whole = 0
    for search, answers in zip(searches, results, strict=True):
        expected = worker.truth.beams(*search)
        assert [list(answer.token_ids) for answer in answers] == [token_ids for token_ids, _ in expected], search
        scores = [answer.finished.score for answer in answers]
        assert scores == pytest.approx([score for _, score in expected], abs=TOLERANCE), search
        num_ended += sum(answer.finished.finish_reason is FinishReason.STOP_TOKEN for answer in answers)
        num_whole += sum(answer.finished.finish_reason is FinishReason.LENGTH for answer in answers)
    assert num_ended > 0 and num_whole > 0, "every hypothesis ended for the same reason"
    assert worker.client.status().workers[0].num_blocks_held == 0
