"""The production scheduler and the real engine in one process, in a pool that is far too small: each token as alone.

Preempted by recompute under every policy and by swap under the default one, with forks of shared blocks, prefix hits,
chunks of a few tokens or whole prompts, plans ahead of results and plans for several steps.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from motet.v1 import plan_pb2
from safetensors.torch import load_file, save_file

from control_plane.fleet.wire import PlanEncoder, limits_of
from control_plane.scheduler.scheduler import Scheduler
from control_plane.scheduler.settings import Policy, SchedulerSettings
from control_plane.scheduler.stats import SchedulerStats
from control_plane.scheduler.types import (
    AdapterRef,
    FinishReason,
    LoadSlot,
    Request,
    RequestId,
    RequestOutput,
    Sampling,
    sample_seed,
)
from data_plane.engine.build import build_engine
from data_plane.engine.engine import TorchEngine
from data_plane.plan import RowSampling
from data_plane.wire import decode_steps, encode_hello, encode_output
from tests.data_plane.engine.packing import PackedAdapter, pack
from tests.data_plane.engine.planner import Job, Planner
from tests.data_plane.engine.test_oracle import worker_config
from tests.makers import make_adapter, make_checkpoint

pytestmark = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")

NUM_TOKENS = 14
SHARED = [7, 99, 30, 201, 5, 64, 18, 77, 140]  # a full block and more, so that prompts hit each other's prefix
PROMPTS = ([5, 9, 200], [*SHARED, 3], [*SHARED, 8, 8, 1], [11] * 29, [*SHARED, 3], [250, 2, 31, 77, 12, 8, 44])
Answers = dict[tuple[int, int], list[int]]  # (request, index) -> tokens


@dataclass(frozen=True)
class Rig:
    """One checkpoint: engines with little and with enough room, and an adapter."""

    small: TorchEngine  # 12 blocks of 8 tokens, 16 in host memory; one request takes up to 6
    adapter: PackedAdapter
    expected: Answers


def sampling_of(number: int) -> Sampling:
    """Greedy, drawn, and drawn with penalties."""
    drawn = Sampling(temperature=0.9, top_k=40, top_p=0.95, seed=100 + number)
    return (Sampling(), drawn, replace(drawn, repetition_penalty=0.5, frequency_penalty=0.4, min_p=0.01))[number % 3]


def num_samples_of(number: int) -> int:
    return 3 if number == 1 else 4 if number == 4 else 1


def request(number: int, adapter: AdapterRef) -> Request:
    return Request(
        RequestId(number),
        tuple(PROMPTS[number]),
        NUM_TOKENS,
        adapter=adapter if number % 2 else None,
        sampling=sampling_of(number),
        num_samples=num_samples_of(number),
    )


def alone(engine: TorchEngine, number: int, index: int) -> list[int]:
    """What one sample answers in an engine of its own."""
    sampling = sampling_of(number)
    settings = RowSampling(
        sampling.temperature,
        sampling.top_k,
        sampling.top_p,
        sample_seed(sampling.seed, index),
        min_p=sampling.min_p,
        repetition_penalty=sampling.repetition_penalty,
        frequency_penalty=sampling.frequency_penalty,
    )
    job = Job(PROMPTS[number], NUM_TOKENS, *((0, 1) if number % 2 else (None, 0)), sampling=settings)
    Planner(engine, chunk=64).run([job])
    return job.tokens


@pytest.fixture(scope="module")
def rig(tmp_path_factory: pytest.TempPathFactory) -> Rig:
    directory = tmp_path_factory.mktemp("rig")
    checkpoint = make_checkpoint(directory / "model", "llama")
    roomy = build_engine(worker_config(checkpoint))
    adapter = pack(make_adapter(Path(directory / "adapter"), checkpoint, seed=3), roomy.capacities.model_fingerprint)
    roomy.slots.load(0, 1, adapter.digest, adapter)
    answers = [(number, index) for number in range(len(PROMPTS)) for index in range(num_samples_of(number))]
    expected = {(number, index): alone(roomy, number, index) for number, index in answers}
    small = build_engine(worker_config(checkpoint, num_blocks=12, host_kv_bytes=16 * 4096, max_model_len=64))
    return Rig(small, adapter, expected)


def serve(
    rig: Rig, settings: SchedulerSettings, *, plan_depth: int = 2, max_steps: int = 1, num_host_blocks: int = 16
) -> tuple[Answers, SchedulerStats]:
    """Run all requests; results come back when `plan_depth` plans are under way, or nothing more can be planned."""
    engine = rig.small
    engine.reset()
    hello = encode_hello(replace(engine.capacities, num_host_blocks=num_host_blocks), "worker").hello
    scheduler = Scheduler(limits_of(hello, plan_depth), settings)
    encoder = PlanEncoder(1, engine.capacities.vocab_size)
    adapter = AdapterRef(rig.adapter.digest, arena_bytes_of(rig, engine))
    for number in range(len(PROMPTS)):
        scheduler.add(request(number, adapter), 0.0)
    results: deque[plan_pb2.StepResult] = deque()
    answers: Answers = {key: [] for key in rig.expected}
    for _ in range(3000):
        if not scheduler.num_unfinished and not results:
            break
        for command in scheduler.slot_commands():
            assert isinstance(command, LoadSlot), "the only adapter is evicted"
            engine.slots.load(command.slot, command.generation, command.digest, rig.adapter)
            scheduler.slot_ready(command.slot, command.generation)
        plan = scheduler.plan(0.0, max_steps)
        if plan is not None:
            for step in decode_steps(encoder.encode(plan).step_plan):
                results.append(encode_output(engine.execute(step), 1).step_result)
            continue
        assert results, "nothing is planned and nothing is under way"
        result = encoder.decode_result(results.popleft())
        assert result is not None and not result.failed_rows
        for output in scheduler.apply(result, 0.0):
            answers[output.request_id, output.index] += output.token_ids
        scheduler.check_invariants()
    assert not scheduler.num_unfinished, "not done after 3000 turns"
    return answers, scheduler.stats()


def arena_bytes_of(rig: Rig, engine: TorchEngine) -> int:
    """Measured: of the adapter in the engine's arena."""
    engine.slots.load(0, 1, rig.adapter.digest, rig.adapter)
    used = engine.slots.used_bytes()
    engine.slots.evict(0, 1)
    return used


SWAPS = SchedulerSettings(swap_us_per_block=0.0)  # moving is free: whoever can be swapped is


@pytest.mark.parametrize("max_step_tokens", [5, 10, 64])
def test_swapped_groups_and_rows_go_on_with_their_tokens(rig: Rig, max_step_tokens: int) -> None:
    answers, stats = serve(rig, replace(SWAPS, max_step_tokens=max_step_tokens))
    assert answers == rig.expected
    assert stats.num_swapped_out > 0 and stats.prefix_hit_tokens > 0
    assert (stats.num_host_blocks_held, stats.num_blocks_held) == (0, 0)


@pytest.mark.parametrize("policy", Policy)
def test_recomputed_requests_go_on_with_their_tokens(rig: Rig, policy: Policy) -> None:
    answers, stats = serve(rig, SchedulerSettings(policy=policy), num_host_blocks=0)
    assert answers == rig.expected
    assert stats.num_preemptions > stats.num_swapped_out == 0


@pytest.mark.parametrize(("plan_depth", "max_steps"), [(1, 1), (4, 1), (2, 4)])
def test_plans_ahead_of_results_change_no_token(rig: Rig, plan_depth: int, max_steps: int) -> None:
    answers, stats = serve(rig, SWAPS, plan_depth=plan_depth, max_steps=max_steps)
    assert answers == rig.expected
    assert stats.num_preemptions > 0


def test_answers_are_worth_comparing(rig: Rig) -> None:
    assert len({tuple(tokens) for tokens in rig.expected.values()}) == len(rig.expected)


def test_chunk_of_a_told_prompt_that_is_not_finite_ends_its_request_alone(rig: Rig, tmp_path: Path) -> None:
    """An adapter of finite weights that are far too large: no row fails in a chunk, for none samples."""
    directory = make_adapter(tmp_path / "huge", make_checkpoint(tmp_path / "model", "llama"), seed=3)
    for file in Path(directory).glob("*.safetensors"):
        save_file({name: torch.full_like(weight, 1e30) for name, weight in load_file(file).items()}, file)
    engine = rig.small
    engine.reset()
    huge = pack(directory, engine.capacities.model_fingerprint)
    hello = encode_hello(engine.capacities, "worker").hello
    scheduler = Scheduler(limits_of(hello, 2), SchedulerSettings(max_step_tokens=8))
    encoder = PlanEncoder(1, engine.capacities.vocab_size)
    scheduler.add(replace(request(3, AdapterRef(huge.digest, 1)), sampling=Sampling(num_prompt_logprobs=0)), 0.0)
    scheduler.add(request(0, AdapterRef(huge.digest, 1)), 0.0)
    outputs: list[RequestOutput] = []
    while scheduler.num_unfinished:
        for command in scheduler.slot_commands():
            engine.slots.load(command.slot, command.generation, huge.digest, huge)
            scheduler.slot_ready(command.slot, command.generation)
        plan = scheduler.plan(0.0)
        assert plan is not None
        for step in decode_steps(encoder.encode(plan).step_plan):
            result = encoder.decode_result(encode_output(engine.execute(step), 1).step_result)
            assert result is not None and not result.failed_rows
            outputs += scheduler.apply(result, 0.0)
    ends = [(output.request_id, output.finish_reason) for output in outputs if output.finish_reason is not None]
    assert ends == [(3, FinishReason.NOT_FINITE), (0, FinishReason.LENGTH)]
    tokens = [token_id for output in outputs if output.request_id == 0 for token_id in output.token_ids]
    assert tokens == rig.expected[0, 0], "its neighbour's answer changed"
