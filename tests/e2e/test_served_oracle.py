"""Greedy tokens equal those of transformers + PEFT, for every architecture that is promised.

One batch mixes the base model and three adapters of different ranks and targets; prompts of different lengths are
prefilled in chunks, some share a prefix, and the KV cache is too small for all of them, so that some are preempted.
Every architecture goes through production ingest, scheduler, wire and engine in this process; what is different from
one process to the next is the same for all of them, and three are served as a user would.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from control_plane.registry.model.base_model import BaseModel
from control_plane.scheduler.settings import SchedulerSettings
from control_plane.scheduler.types import Request, RequestId
from data_plane.engine.build import build_engine
from tests.data_plane.engine.test_oracle import worker_config
from tests.e2e.harness import System
from tests.e2e.scheduled import ingested, serve
from tests.e2e.traffic import Job, JobCompletion, ask_all, prompts
from tests.makers import ARCHS, make_adapter, make_checkpoint
from tests.oracle import Oracle

NUM_TOKENS = 20
# Small enough that all requests together do not fit: 40 blocks of 4 tokens against 24 requests of up to 60 tokens.
WORKER_FLAGS = ["--dtype", "float32", "--block-size", "4", "--num-blocks", "40", "--token-budget", "24"]
WORKER_FLAGS += ["--max-rows", "12", "--num-slots", "4", "--arena-bytes", "64MiB", "--max-model-len", "128"]
SHARED = prompts([24], vocab_size=256, seed=5)[0]
TEXTS = [*prompts([1, 6, 19, 40], vocab_size=256, seed=7), (*SHARED, 30), (*SHARED, 40, 41, 42)]
JOBS = [Job(prompt, name, NUM_TOKENS) for prompt in TEXTS for name in ["", "one", "two", "three"]]

pytestmark = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")


def linear_suffixes(checkpoint: Path) -> list[str]:
    """Last name parts of the linears in the decoder layers, sorted."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(checkpoint))
    linears = {
        name for name, module in model.named_modules() if isinstance(module, torch.nn.Linear) and ".layers." in name
    }
    return sorted({name.rsplit(".", 1)[1] for name in linears})


def make_adapters(checkpoint: Path, directory: Path) -> dict[str, Path]:
    """Three that differ in rank, targets and kind."""
    targets = linear_suffixes(checkpoint)
    return {
        "one": make_adapter(directory / "one", checkpoint, rank=3, alpha=6, targets=targets[:1], seed=1),
        "two": make_adapter(directory / "two", checkpoint, rank=8, alpha=16, targets=targets, seed=2),
        "three": make_adapter(
            directory / "three", checkpoint, rank=17, alpha=16, targets=targets[-2:], seed=3, rslora=True, use_dora=True
        ),
    }


def check(completions: list[JobCompletion], oracle: Oracle) -> None:
    """Each token is the model's choice, and adapters have completions of their own."""
    num_agreed = sum(
        oracle.num_agreed(completion.job.prompt, completion.token_ids, completion.job.adapter)
        for completion in completions
    )
    assert {len(completion.token_ids) for completion in completions} == {NUM_TOKENS}
    assert num_agreed >= 0.9 * NUM_TOKENS * len(completions), "too few tokens that rounding cannot turn"
    by_adapter = {
        name: [completion.token_ids for completion in completions[: len(JOBS)] if completion.job.adapter == name]
        for name in ["", "one", "two", "three"]
    }
    assert len({str(answered) for answered in by_adapter.values()}) == 4, "the adapters change nothing"


@pytest.mark.parametrize("arch", ARCHS)
def test_mixed_batch_generates_as_transformers_and_peft(arch: str, tmp_path: Path) -> None:
    checkpoint = make_checkpoint(tmp_path / "base", arch=arch)
    directories = make_adapters(checkpoint, tmp_path)
    base_model = BaseModel.load(checkpoint)
    adapters = {name: ingested(directory, base_model) for name, directory in directories.items()}
    engine = build_engine(
        worker_config(checkpoint, num_blocks=40, block_size=4, token_budget=24, max_rows=12, max_model_len=128)
    )
    jobs = [*JOBS, *JOBS[-8:]]  # the shared prefix is cached when the last ones begin
    requests = [
        Request(
            RequestId(number),
            job.prompt,
            NUM_TOKENS,
            adapter=adapters[job.adapter].ref if job.adapter else None,
        )
        for number, job in enumerate(jobs)
    ]
    got, stats = serve(engine, requests, list(adapters.values()), SchedulerSettings())
    check(
        [JobCompletion(job, got[number, 0].token_ids, "") for number, job in enumerate(jobs)],
        Oracle(checkpoint, directories),
    )
    assert stats.num_preemptions > 0 and stats.prefix_hit_tokens > 0


@pytest.mark.slow
@pytest.mark.parametrize("arch", ["llama", "gemma2", "qwen3_moe"])
def test_served_system_generates_as_transformers_and_peft(arch: str, tmp_path: Path) -> None:
    checkpoint = make_checkpoint(tmp_path / "base", arch=arch)
    directories = make_adapters(checkpoint, tmp_path)
    with System(checkpoint, tmp_path) as system:
        client = system.client()
        for name, directory in directories.items():
            client.adapters.register(name, directory)
        system.start_worker(flags=WORKER_FLAGS)
        completions = ask_all(client, JOBS)
        completions += ask_all(client, JOBS[-8:])  # the shared prefix is cached by now
        worker = client.status().workers[0]
    check(completions, Oracle(checkpoint, directories))
    assert worker.num_preemptions > 0 and worker.prefix_hit_tokens > 0
