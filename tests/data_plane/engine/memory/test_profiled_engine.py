"""A worker runs its largest step before it makes KV blocks, and gives them what is left."""

from __future__ import annotations

import gc
import logging
from pathlib import Path
from typing import Any

import pytest
import torch

from data_plane.adapters.arena.slots import table_bytes
from data_plane.engine.build import build_engine
from data_plane.engine.engine import TorchEngine
from data_plane.engine.kv_cache import KVCache
from data_plane.errors import ConfigError
from data_plane.models.loader import LoadedModel
from data_plane.plan import MAX_ROW_ADAPTERS, StepOutput, StepPlan
from tests.data_plane.engine.planner import Job, Planner
from tests.data_plane.engine.test_oracle import worker_config

JOBS = ([5, 9, 200, 31, 77, 12, 8], [8, 12, 77] * 9)
STEP_BYTES = 3 << 20


class FakeMemory:
    """A device of 64 MiB with 10 held by this process, and a step that takes 3. Counts its own calls."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def total_bytes(self) -> int:
        return 64 << 20

    def free_bytes(self) -> int:
        self.calls.append("free")
        return 54 << 20

    def release(self) -> None:
        self.calls.append("release")

    def own_bytes(self) -> int:
        return 10 << 20

    def begin_peak(self) -> None:
        self.calls.append("begin")

    def peak_bytes(self) -> int:
        self.calls.append("peak")
        return self.own_bytes() + STEP_BYTES


def completions(engine: TorchEngine) -> list[list[int]]:
    jobs = [Job(prompt, 6) for prompt in JOBS]
    Planner(engine, chunk=5).run(jobs)
    return [job.tokens for job in jobs]


@pytest.fixture
def plans(monkeypatch: pytest.MonkeyPatch) -> list[StepPlan]:
    """Every plan that any engine executes."""
    executed: list[StepPlan] = []
    execute = TorchEngine.execute

    def watched(engine: TorchEngine, plan: StepPlan) -> StepOutput:
        executed.append(plan)
        return execute(engine, plan)

    monkeypatch.setattr(TorchEngine, "execute", watched)
    return executed


def test_the_largest_step_decides_how_many_blocks_there_are(
    checkpoint: Path, plans: list[StepPlan], monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = {"num_blocks": None, "max_model_len": None, "max_rows": 200, "arena_bytes": 1 << 20}
    memory = FakeMemory()

    def make_cache(*arguments: Any, **named: Any) -> KVCache:
        memory.calls.append("cache")
        return KVCache(*arguments, **named)

    monkeypatch.setattr("data_plane.engine.build.KVCache", make_cache)
    config = worker_config(checkpoint, memory_utilization=0.5, token_budget=512, **settings)
    engine = build_engine(config, memory=memory)
    # What loading left is given back first, and what the step left before the KV blocks are made.
    assert memory.calls == ["release", "cache", "begin", "free", "peak", "release", "cache"]
    largest = max(plans, key=lambda plan: (int(plan.prefills[:, 1].sum()), len(plan.new_rows)))
    assert (len(largest.new_rows), largest.prefills[:, 1].sum()) == (200, 512)
    assert {row.slot for row in largest.new_rows} == {0}, "an adapter is in the step"
    assert any(row.sampling.num_prompt_logprobs is not None for plan in plans for row in plan.new_rows)
    use, block_bytes = engine.capacities.memory, engine.kv_cache.tensors[0][0].nbytes * len(engine.kv_cache.tensors)
    assert (use.device_bytes, use.weights_bytes, use.step_bytes) == (64 << 20, 10 << 20, STEP_BYTES)
    assert use.kv_bytes == engine.capacities.num_blocks * block_bytes
    # Half of the device, without what is held, the arena with its table, and the step: the rest is a block at most.
    probe_bytes = (200 + 64 + 200 + 1) * block_bytes
    arena_bytes = (1 << 20) + table_bytes(engine.model.targets(), config.num_slots, 200 * MAX_ROW_ADAPTERS)
    left = (32 << 20) - (10 << 20) + probe_bytes - arena_bytes - STEP_BYTES - use.kv_bytes
    assert 0 <= left < block_bytes
    fewer = build_engine(
        worker_config(checkpoint, memory_utilization=0.5, memory_headroom_bytes=1 << 20, token_budget=512, **settings),
        memory=FakeMemory(),
    )
    assert engine.capacities.num_blocks - fewer.capacities.num_blocks == (1 << 20) // block_bytes
    assert fewer.capacities.memory.headroom_bytes == 1 << 20
    # On the CPU adapters that are kept beside the arena share the memory.
    fewer = build_engine(
        worker_config(checkpoint, memory_utilization=0.5, pinned_bytes=2 << 20, token_budget=512, **settings),
        memory=FakeMemory(),
    )
    assert engine.capacities.num_blocks - fewer.capacities.num_blocks == (2 << 20) // block_bytes
    assert fewer.capacities.memory.pinned_bytes == 2 << 20


@pytest.mark.parametrize("max_rows", [1, 7])
def test_the_largest_step_keeps_the_logits_of_all_rows_and_those_that_a_prompt_may_want(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch, max_rows: int
) -> None:
    """A pass may keep both, and drafts are as many as the tokens of such a prompt."""
    passes: list[tuple[int, int]] = []  # tokens, and those whose logits are kept
    logits_of = LoadedModel.logits

    def watched(model: LoadedModel, ids: torch.Tensor, positions: torch.Tensor, kept: torch.Tensor) -> torch.Tensor:
        passes.append((len(ids), len(kept)))
        return logits_of(model, ids, positions, kept)

    monkeypatch.setattr(LoadedModel, "logits", watched)
    monkeypatch.setattr("data_plane.engine.warm_up.PROMPT_LOGITS_BYTES", 20 * 4 * 256)
    settings = {"num_blocks": None, "max_model_len": None, "max_rows": max_rows, "token_budget": 64}
    memory, measured = FakeMemory(), list[tuple[int, int]]()

    def end_peak() -> int:
        measured.extend(passes)  # those that check the model come before and after
        return STEP_BYTES

    monkeypatch.setattr(memory, "begin_peak", passes.clear)
    monkeypatch.setattr(memory, "peak_bytes", end_peak)
    build_engine(worker_config(checkpoint, memory_utilization=0.5, **settings), memory=memory)
    prompt = 20 - 1  # the first token of a prompt has no log-probability
    assert max(measured) == (64, 7 + prompt if max_rows == 7 else 1)
    assert max(kept for _, kept in measured) == max_rows + prompt
    assert (max_rows, max_rows) in measured, "the decodes of all rows"


def test_graphs_that_are_recorded_later_have_their_memory(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("data_plane.engine.build.check_graphs", lambda *_: None)  # a CPU records none
    with pytest.raises(ConfigError, match=r"no KV block of .* fits: .* graphs 512\.0 MiB"):
        build_engine(worker_config(checkpoint, num_blocks=None, cuda_graphs="2"), memory=FakeMemory())


def test_named_blocks_run_no_step(checkpoint: Path, plans: list[StepPlan]) -> None:
    by_bytes = build_engine(worker_config(checkpoint, num_blocks=None, kv_bytes=1 << 20))
    assert not plans
    use = by_bytes.capacities.memory
    assert (1 << 20) - use.kv_bytes < use.kv_bytes / by_bytes.capacities.num_blocks
    assert use.step_bytes == 0 and use.weights_bytes > 0


def test_a_worker_that_measured_its_step_generates_as_one_that_did_not(
    checkpoint: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """On the machine's own memory. The cache of the measured step is gone, and nothing of it is left in the engine."""
    with caplog.at_level(logging.INFO):
        measured = build_engine(worker_config(checkpoint, num_blocks=None, max_model_len=None))
    gc.collect()
    caches = [held for held in gc.get_objects() if type(held) is KVCache]
    assert sum(len(cache.keys[0]) == measured.capacities.num_blocks for cache in caches) == 1
    assert not any(len(cache.keys[0]) == 32 + 128 + 32 + 1 for cache in caches), "the measured step's cache"
    use = measured.capacities.memory
    assert 0 < use.weights_bytes < use.device_bytes and use.kv_bytes > 0
    lines = [record.getMessage() for record in caplog.records if record.getMessage().startswith("memory ")]
    assert len(lines) == 1 and f"step_bytes={use.step_bytes} kv_bytes={use.kv_bytes}" in lines[0]
    assert measured.slots.used_bytes() == 0
    measured.arena.check_invariants()
    assert completions(measured) == completions(build_engine(worker_config(checkpoint)))
