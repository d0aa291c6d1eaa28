"""Production scheduler, wire and engine in one process, in a pool that is far too small: each completion as alone.

Covered, each with groups of 3 and 4 samples, beam searches and prefix hits: preemption by recompute under every policy
in steps of 7 and of 64 tokens; by swap in the same steps under the policies that swap (first come first served does
not), where a beam search is among the swapped; steps of one token under every policy, where little runs side by side;
and under the default policy plans ahead of results and plans for several steps. Greedy tokens, log-probabilities of
samples, and hypotheses with their scores are those of transformers + PEFT; which tokens are drawn is what the same
engine draws with room for all.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from control_plane.registry.model.base_model import BaseModel
from control_plane.scheduler.settings import Policy, SchedulerSettings
from control_plane.scheduler.stats import SchedulerStats
from control_plane.scheduler.types import (
    BeamSearch,
    FinishReason,
    Request,
    RequestId,
    Sampling,
    StepPlan,
    sample_seed,
)
from data_plane.engine.build import build_engine
from data_plane.engine.engine import TorchEngine
from data_plane.plan import RowSampling
from tests.data_plane.engine.planner import Job, Planner
from tests.data_plane.engine.test_oracle import worker_config
from tests.e2e.scheduled import Completions, IngestedAdapter, ingested, serve
from tests.makers import make_adapter, make_checkpoint
from tests.oracle import Oracle

pytestmark = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")

NUM_TOKENS = 14
SHARED = [7, 99, 30, 201, 5, 64, 18, 77, 140]  # a full block and more, so that prompts hit each other's prefix
PROMPTS = ([5, 9, 200], [*SHARED, 3], [*SHARED, 8, 8, 1], [11] * 29, [*SHARED, 3], [250, 2, 31, 77, 12, 8, 44])
SEARCHES = ((*SHARED, 3), BeamSearch(4, 1.0)), ((*SHARED, 60), BeamSearch(3, -0.5, early_stopping=True))
CHUNKS = [7, 64]  # tokens of a step
TOLERANCE = 1e-4  # sums of another order differ by 1e-5 here


@dataclass(frozen=True)
class Rig:
    """One checkpoint with an adapter: an engine with little room, the requests, and what is true of them."""

    engine: TorchEngine  # 12 blocks of 8 tokens, 16 in host memory; one request takes up to 6
    adapter: IngestedAdapter
    requests: list[Request]
    drawn: dict[tuple[RequestId, int], list[int]]  # by request and index, of those that are not a beam search
    oracle: Oracle

    def adapter_of(self, request: Request) -> str:
        """As the oracle names it."""
        return "one" if request.adapter else ""

    def check(self, completions: Completions) -> None:
        """Every completion of every request must be the true one."""
        for request in self.requests:
            prompt, adapter = request.prompt_token_ids, self.adapter_of(request)
            if request.beam is not None:
                beam = request.beam
                expected = self.oracle.beams(
                    prompt,
                    adapter,
                    beam.width,
                    beam.length_penalty,
                    beam.early_stopping,
                    max_tokens=NUM_TOKENS,
                    stop_token_ids=sorted(request.stop_token_ids),
                )
                got = [completions[request.request_id, index] for index in range(beam.width)]
                assert [served.token_ids for served in got] == [token_ids for token_ids, _ in expected]
                assert [served.score for served in got] == pytest.approx([s for _, s in expected], abs=TOLERANCE)
                continue
            for index in range(request.num_samples):
                served = completions[request.request_id, index]
                assert served.token_ids == self.drawn[request.request_id, index]
                rows = self.oracle.logits([*prompt, *served.token_ids], adapter)[len(prompt) - 1 : -1].log_softmax(-1)
                expected_logprobs = [float(row[token]) for row, token in zip(rows, served.token_ids, strict=True)]
                assert [entry.logprob for entry in served.logprobs] == pytest.approx(expected_logprobs, abs=TOLERANCE)


def sampling_of(number: int) -> Sampling:
    """Greedy, drawn, and drawn with penalties."""
    greedy = Sampling(num_logprobs=0)
    drawn = replace(greedy, temperature=0.9, top_k=40, top_p=0.95, seed=100 + number)
    return (greedy, drawn, replace(drawn, repetition_penalty=0.5, frequency_penalty=0.4, min_p=0.01))[number % 3]


def make_requests(adapter: IngestedAdapter, oracle: Oracle) -> list[Request]:
    """Six that sample, every second with the adapter, and between them the searches: those before go first."""
    samples = [
        Request(
            RequestId(number),
            tuple(prompt),
            NUM_TOKENS,
            adapter=adapter.ref if number % 2 else None,
            sampling=sampling_of(number),
            num_samples={1: 3, 4: 4}.get(number, 1),
        )
        for number, prompt in enumerate(PROMPTS)
    ]
    searches: list[Request] = []
    for number, (prompt, beam) in enumerate(SEARCHES):
        name = "" if number % 2 else "one"
        likely = oracle.logits(prompt, name)[-1].topk(3).indices.tolist()  # some hypotheses end early
        searches.append(
            Request(
                RequestId(len(PROMPTS) + number),
                prompt,
                NUM_TOKENS,
                adapter=adapter.ref if name else None,
                beam=beam,
                stop_token_ids=frozenset(likely[-1:]),
            )
        )
    return [*samples[:2], *searches, *samples[2:]]


def alone(engine: TorchEngine, request: Request, index: int) -> list[int]:
    """What one sample generates in an engine of its own."""
    sampling = request.sampling
    settings = RowSampling(
        sampling.temperature,
        sampling.top_k,
        sampling.top_p,
        sample_seed(sampling.seed, index),
        min_p=sampling.min_p,
        repetition_penalty=sampling.repetition_penalty,
        frequency_penalty=sampling.frequency_penalty,
    )
    job = Job(list(request.prompt_token_ids), NUM_TOKENS, sampling=settings)
    if request.adapter:
        job.slot, job.generation = 0, 1
    Planner(engine, chunk=64).run([job])
    return job.tokens


@pytest.fixture(scope="module")
def rig(tmp_path_factory: pytest.TempPathFactory) -> Rig:
    directory = tmp_path_factory.mktemp("rig")
    checkpoint = make_checkpoint(directory / "model", "llama")
    adapter_dir = make_adapter(directory / "adapter", checkpoint, seed=3)
    adapter = ingested(adapter_dir, BaseModel.load(checkpoint))
    oracle = Oracle(checkpoint, {"one": adapter_dir})
    requests = make_requests(adapter, oracle)
    roomy = build_engine(worker_config(checkpoint))
    roomy.slots.load(0, 1, adapter.info.digest, adapter)
    drawn = {
        (request.request_id, index): alone(roomy, request, index)
        for request in requests
        if request.beam is None
        for index in range(request.num_samples)
    }
    small = build_engine(worker_config(checkpoint, num_blocks=12, host_kv_bytes=16 * 4096, max_model_len=64))
    return Rig(small, adapter, requests, drawn, oracle)


class SwapWatch:
    """Which requests left to host memory and came back."""

    def __init__(self) -> None:
        self.seen: set[int] = set()
        self.swapped_in: set[int] = set()

    def __call__(self, plan: StepPlan) -> None:
        new = {row.request_id for row in plan.new_rows}
        if len(plan.swap_ins) > 0:
            self.swapped_in |= new & self.seen
        self.seen |= new


def run(
    rig: Rig, settings: SchedulerSettings, *, num_host_blocks: int = 0, **ahead: Any
) -> tuple[SchedulerStats, set[int]]:
    """Serve and check all requests; the numbers, and who was swapped in."""
    watch = SwapWatch()
    completions, stats = serve(
        rig.engine, rig.requests, [rig.adapter], settings, num_host_blocks=num_host_blocks, on_plan=watch, **ahead
    )
    rig.check(completions)
    return stats, watch.swapped_in


@pytest.mark.parametrize("chunk", CHUNKS)
@pytest.mark.parametrize("policy", [Policy.CHUNKED_PREFILL, Policy.PREFILL_FIRST])
def test_swapped_samples_and_beams_go_on_with_their_tokens(rig: Rig, policy: Policy, chunk: int) -> None:
    settings = SchedulerSettings(policy=policy, max_step_tokens=chunk)
    stats, swapped_in = run(rig, settings, num_host_blocks=16)
    searches = {request.request_id for request in rig.requests if request.beam is not None}
    assert stats.num_swapped_out > 0 and stats.prefix_hit_tokens > 0
    assert swapped_in & searches, "no beam search came back from host memory"


@pytest.mark.parametrize("chunk", CHUNKS)
@pytest.mark.parametrize("policy", Policy)
def test_recomputed_samples_and_beams_go_on_with_their_tokens(rig: Rig, policy: Policy, chunk: int) -> None:
    stats, _ = run(rig, SchedulerSettings(policy=policy, max_step_tokens=chunk))
    assert stats.num_preemptions > stats.num_swapped_out == 0
    assert stats.prefix_hit_tokens > 0


@pytest.mark.parametrize("policy", Policy)
def test_steps_of_one_token_serve_samples_and_beams(rig: Rig, policy: Policy) -> None:
    stats, _ = run(rig, SchedulerSettings(policy=policy, max_step_tokens=1))
    assert stats.prefix_hit_tokens > 0


@pytest.mark.parametrize(("plan_depth", "max_steps"), [(1, 1), (4, 1), (2, 4)])
def test_plans_ahead_of_results_change_no_token(rig: Rig, plan_depth: int, max_steps: int) -> None:
    settings = SchedulerSettings(swap_us_per_block=0.0)
    stats, _ = run(rig, settings, num_host_blocks=16, plan_depth=plan_depth, max_steps=max_steps)
    assert stats.num_preemptions > 0


def test_greedy_completions_are_those_of_transformers_and_peft(rig: Rig) -> None:
    """What the tests above compare samples with is of the same engine: here it meets the oracle."""
    greedy = [request for request in rig.requests if not request.sampling.temperature and request.beam is None]
    num_agreed = [
        rig.oracle.num_agreed(request.prompt_token_ids, rig.drawn[request.request_id, 0], rig.adapter_of(request))
        for request in greedy
    ]
    assert len(greedy) == 2 and min(num_agreed) > NUM_TOKENS // 2


def test_completions_are_worth_comparing(rig: Rig) -> None:
    assert len({tuple(tokens) for tokens in rig.drawn.values()}) == len(rig.drawn)


def test_chunk_of_a_prompt_with_logprobs_that_is_not_finite_ends_its_request_alone(rig: Rig, tmp_path: Path) -> None:
    """An adapter of finite weights that are far too large: no row fails in a chunk, for none samples."""
    checkpoint = make_checkpoint(tmp_path / "model", "llama")
    directory = make_adapter(tmp_path / "huge", checkpoint, seed=3)
    for file in directory.glob("*.safetensors"):
        save_file({name: torch.full_like(weight, 1e30) for name, weight in load_file(file).items()}, file)
    huge = ingested(directory, BaseModel.load(checkpoint))
    by_id = {request.request_id: request for request in rig.requests}
    with_prompt_logprobs = replace(by_id[RequestId(3)], adapter=huge.ref, sampling=Sampling(num_prompt_logprobs=0))
    completions, _ = serve(
        rig.engine, [with_prompt_logprobs, by_id[RequestId(0)]], [huge], SchedulerSettings(max_step_tokens=8)
    )
    ends = {request_id: served.finish_reason for (request_id, _), served in completions.items()}
    assert ends == {3: FinishReason.NOT_FINITE, 0: FinishReason.LENGTH}
    assert completions[0, 0].token_ids == rig.drawn[RequestId(0), 0], "its neighbour's completion changed"
