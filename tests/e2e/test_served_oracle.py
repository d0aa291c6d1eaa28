"""Greedy tokens of the served system equal those of transformers + PEFT, for every architecture that is promised.

One batch mixes the base model and three adapters of different ranks and targets; prompts of different lengths are
prefilled in chunks, some share a prefix, and the KV cache is too small for all of them, so that some are preempted.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from tests.e2e.harness import System
from tests.e2e.traffic import Job, ask_all, prompts
from tests.makers import ARCHS, make_adapter, make_checkpoint
from tests.oracle import Oracle

NUM_TOKENS = 20
# Small enough that all requests together do not fit: 30 blocks of 4 tokens against 16 requests of up to 60 tokens.
WORKER_FLAGS = ["--dtype", "float32", "--block-size", "4", "--num-blocks", "40", "--token-budget", "24"]
WORKER_FLAGS += ["--max-rows", "12", "--num-slots", "4", "--arena-bytes", "64MiB", "--max-model-len", "128"]


def linear_suffixes(checkpoint: Path) -> list[str]:
    """Last name parts of the linears in the decoder layers, sorted."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(checkpoint))
    linears = {
        name for name, module in model.named_modules() if isinstance(module, torch.nn.Linear) and ".layers." in name
    }
    return sorted({name.rsplit(".", 1)[1] for name in linears})


@pytest.mark.slow
@pytest.mark.parametrize("arch", ARCHS)
def test_mixed_batch_answers_as_transformers_and_peft(arch: str, tmp_path: Path) -> None:
    checkpoint = make_checkpoint(tmp_path / "base", arch=arch)
    targets = linear_suffixes(checkpoint)
    adapters = {
        "one": make_adapter(tmp_path / "one", checkpoint, rank=3, alpha=6, targets=targets[:1], seed=1),
        "two": make_adapter(tmp_path / "two", checkpoint, rank=8, alpha=16, targets=targets, seed=2),
        "three": make_adapter(
            tmp_path / "three", checkpoint, rank=17, alpha=16, targets=targets[-2:], seed=3, rslora=True
        ),
    }
    oracle = Oracle(checkpoint, adapters)
    shared = prompts([24], vocab_size=256, seed=5)[0]
    texts = [*prompts([1, 6, 19, 40], vocab_size=256, seed=7), (*shared, 30), (*shared, 40, 41, 42)]
    jobs = [Job(prompt, name, NUM_TOKENS) for prompt in texts for name in ["", *adapters]]

    with System(checkpoint, tmp_path) as system:
        client = system.client()
        for name, directory in adapters.items():
            client.adapters.register(name, directory)
        system.start_worker(flags=WORKER_FLAGS)
        answers = ask_all(client, jobs)
        answers += ask_all(client, jobs[-8:])  # the shared prefix is cached by now
        status = client.status()

    compared = 0
    for answer in answers:
        expected = oracle.greedy(answer.job.prompt, NUM_TOKENS, answer.job.adapter or None)
        if expected.is_decisive:
            compared += 1
            assert answer.token_ids == expected.token_ids, (answer.job.adapter, len(answer.job.prompt))
    assert compared >= len(answers) // 2, "too few prompts are decisive for the comparison to mean much"
    by_adapter = {
        name: [a.token_ids for a in answers[: len(jobs)] if a.job.adapter == name] for name in ["", *adapters]
    }
    assert len({str(answered) for answered in by_adapter.values()}) == 4, "the adapters change nothing"
    worker = status.workers[0]
    assert worker.num_preemptions > 0
    assert worker.prefix_hit_tokens > 0
