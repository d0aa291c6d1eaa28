"""Many more adapters than the arena holds come and go, and each request is answered by its own."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.e2e.harness import System, active_version
from tests.e2e.traffic import Job, ask_all, prompts
from tests.makers import make_adapter, make_checkpoint
from tests.oracle import Oracle

TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
NUM_ADAPTERS = 64
NUM_ARENA_ADAPTERS = 4  # of rank 8
NUM_TOKENS = 12
WORKER_FLAGS = ["--dtype", "float32", "--block-size", "4", "--num-blocks", "512", "--token-budget", "64"]
WORKER_FLAGS += ["--max-model-len", "256", "--num-slots", "8"]


def redrawn(adapter: Path, directory: Path, *, seed: int) -> Path:
    """A copy of an adapter with other random weights of the same sizes."""
    shutil.copytree(adapter, directory)
    file = directory / "adapter_model.safetensors"
    generator = torch.Generator().manual_seed(seed)
    weights = load_file(file)
    for weight in weights.values():
        weight.copy_(torch.randn(weight.shape, generator=generator) * weight.std(correction=0))
    save_file(weights, file, {"format": "pt"})
    return directory


@pytest.mark.slow
def test_64_adapters_rotate_through_an_arena_that_holds_four(tmp_path: Path) -> None:
    checkpoint = make_checkpoint(tmp_path / "model", arch="llama")
    by_rank = [
        make_adapter(tmp_path / f"r{rank}", checkpoint, rank=rank, alpha=8, targets=TARGETS, seed=100 + rank)
        for rank in range(1, 9)
    ]
    directories = {
        f"rotating-{i}": redrawn(by_rank[i % 8], tmp_path / f"c{i}", seed=200 + i) for i in range(NUM_ADAPTERS)
    }
    texts = prompts([5, 9, 14], vocab_size=256, seed=9)
    jobs = [Job(texts[i % 3], f"rotating-{(i * 37) % NUM_ADAPTERS}", NUM_TOKENS) for i in range(3 * NUM_ADAPTERS)]
    with System(checkpoint, tmp_path / "system") as system:
        client = system.client()
        sizes = [active_version(client.adapters.register(*item)).size_bytes for item in directories.items()]
        system.start_worker(flags=[*WORKER_FLAGS, "--arena-bytes", str(NUM_ARENA_ADAPTERS * max(sizes) + 65536)])
        completions = ask_all(client, jobs, num_threads=24)
        worker = client.status().workers[0]
        assert worker.num_adapters_loaded <= 8
        assert worker.arena_used_bytes <= worker.arena_bytes
        for name in directories:
            client.adapters.delete(name)
        assert list(client.adapters.list()) == []
    num_agreed, names = 0, list(directories)
    for first in range(0, NUM_ADAPTERS, 8):  # PEFT gets slow with all of them
        some = names[first : first + 8]
        oracle = Oracle(checkpoint, {name: directories[name] for name in some})
        for completion in completions:
            if completion.job.adapter in some:
                num_agreed += oracle.num_agreed(completion.job.prompt, completion.token_ids, completion.job.adapter)
    assert num_agreed > 0.9 * NUM_TOKENS * len(jobs)
    assert len({tuple(completion.token_ids) for completion in completions}) > 0.9 * len(jobs), (
        "the adapters change little"
    )
