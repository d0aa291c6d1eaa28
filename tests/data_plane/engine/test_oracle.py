"""Greedy tokens equal transformers + PEFT for every architecture, base and three adapters in one batch."""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from data_plane.config import WorkerConfig
from data_plane.engine.build import build_engine
from data_plane.engine.engine import TorchEngine
from tests.data_plane.engine.packing import pack
from tests.data_plane.engine.planner import Job, Planner
from tests.makers import ARCHS, make_adapter, make_checkpoint
from tests.oracle import GreedyCompletion, Oracle

NUM_TOKENS = 8
PROMPT_LENGTHS = (1, 5, 17, 40, 70)
# Attention projections of each architecture, for an adapter that targets only some linears.
QUERY_VALUE = {"phi3": ["qkv_proj"], "gpt_neox": ["query_key_value"], "gpt2": ["c_attn"]}


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@dataclass
class Served:
    """One architecture: its engine with three adapters in slots, and the true completions."""

    engine: TorchEngine
    prompts: list[list[int]]
    slots: dict[str | None, int | None]
    completions: dict[tuple[int, str | None], GreedyCompletion]

    def jobs(self) -> list[tuple[Job, GreedyCompletion]]:
        """Every prompt with every adapter whose completion rounding cannot change, adapters alternating."""
        return [
            (Job(self.prompts[index], NUM_TOKENS, self.slots[adapter], 1), completion)
            for (index, adapter), completion in self.completions.items()
            if completion.is_decisive
        ]

    def check(self, jobs: list[tuple[Job, GreedyCompletion]]) -> None:
        """All pairs must agree, and be worth comparing: most decisive, adapters with completions of their own."""
        assert len(jobs) >= 0.6 * len(self.completions)
        for job, completion in jobs:
            assert job.tokens == completion.token_ids, f"prompt of {len(job.prompt)} tokens, slot {job.slot}"


def serve(arch: str, directory: Path, **settings: object) -> Served:
    checkpoint = make_checkpoint(directory / "model", arch)
    some = QUERY_VALUE.get(arch, ["q_proj", "v_proj"])
    adapters = {
        "all": make_adapter(directory / "all", checkpoint, rank=8, seed=1),
        "some": make_adapter(directory / "some", checkpoint, rank=4, alpha=8, targets=some, seed=2),
        "rs": make_adapter(directory / "rs", checkpoint, rank=16, alpha=8, rslora=True, seed=3),
    }
    engine = build_engine(worker_config(checkpoint, **settings))
    slots: dict[str | None, int | None] = {None: None}
    for slot, (name, adapter_dir) in enumerate(adapters.items()):
        packed = pack(adapter_dir, engine.capacities.model_fingerprint)
        engine.slots.load(slot, 1, packed.digest, packed)
        slots[name] = slot
    oracle = Oracle(checkpoint, adapters)
    chooser = random.Random(7)
    prompts = [[chooser.randrange(2, 256) for _ in range(length)] for length in PROMPT_LENGTHS]
    completions = {
        (index, adapter): oracle.greedy(prompt, NUM_TOKENS, adapter)
        for index, prompt in enumerate(prompts)
        for adapter in slots
    }
    return Served(engine, prompts, slots, completions)


def worker_config(checkpoint: Path, **settings: object) -> WorkerConfig:
    defaults: dict[str, object] = {
        "device": "cpu",
        "threads": 1,
        "num_blocks": 300,
        "block_size": 8,
        "max_rows": 32,
        "num_slots": 8,
        "arena_bytes": 16 << 20,
        "max_model_len": 256,
        "warm_up": "off",
    }
    return WorkerConfig(
        control_plane="127.0.0.1:1",
        model_dir=checkpoint,
        worker_id="test",
        **(defaults | settings),  # type: ignore[arg-type]
    )


@pytest.mark.parametrize("arch", [*ARCHS, "gpt2"])
def test_mixed_batch_gives_the_tokens_of_transformers_and_peft_alone(arch: str, tmp_path: Path) -> None:
    served = serve(arch, tmp_path)
    assert len({tuple(completion.token_ids) for completion in served.completions.values()}) > len(served.prompts), (
        "adapters do nothing"
    )
    # 1. All in one batch, rows and blocks reused, prefill in chunks of 7 beside decoding rows.
    jobs = served.jobs()
    Planner(served.engine, chunk=7, max_running=9).run([job for job, _ in jobs])
    served.check(jobs)
    # 2. Whole prompts at once, half of the requests preempted on the way and admitted again with their tokens.
    jobs = served.jobs()
    Planner(served.engine, chunk=64).run([job for job, _ in jobs], preempt_at=4)
    served.check(jobs)


@pytest.mark.parametrize("arch", ["llama", "mistral", "gemma2", "opt"])
def test_prefill_token_by_token_and_prefix_reuse_change_nothing(arch: str, tmp_path: Path) -> None:
    served = serve(arch, tmp_path)
    jobs = served.jobs()
    planner = Planner(served.engine, chunk=1)
    planner.run([job for job, _ in jobs], keep_blocks=True)
    served.check(jobs)
    # The same prompts again in the blocks of the first round: all but the last token of the prompt is there already.
    again = []
    for job, completion in jobs:
        second = Job(job.prompt, job.num_tokens, job.slot, job.generation)
        num_shared = (len(job.prompt) - 1) // served.engine.capacities.block_size
        second.blocks = job.blocks[:num_shared]
        second.num_computed = num_shared * served.engine.capacities.block_size
        again.append((second, completion))
    assert any(job.num_computed for job, _ in again)
    planner.run([job for job, _ in again])
    served.check(again)
