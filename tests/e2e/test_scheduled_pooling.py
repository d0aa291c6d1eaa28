"""Embeddings equal transformers' AutoModel with PEFT, in batches with generating rows, for every architecture.

Requests go through production ingest, scheduler, wire and engine in one process.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForSequenceClassification

from control_plane.registry.model.base_model import BaseModel
from control_plane.scheduler.settings import SchedulerSettings
from control_plane.scheduler.types import FinishReason, Pooling, PoolingKind, Request, RequestId, Vector
from data_plane.engine.build import build_engine
from data_plane.engine.engine import TorchEngine
from tests.data_plane.engine.test_oracle import worker_config
from tests.e2e.scheduled import IngestedAdapter, ingested, serve
from tests.e2e.test_served_oracle import make_adapters
from tests.e2e.traffic import prompts
from tests.makers import ARCHS, make_adapter, make_checkpoint, make_classifier
from tests.oracle import Oracle

# Relative error of a vector, by dtype. float32: sums in another order, over two layers. bfloat16: 8 bits are left of
# each value between the layers, and the oracle computes in float32.
MAX_ERROR = {"float32": 1e-4, "bfloat16": 0.05}
KINDS = (PoolingKind.LAST, PoolingKind.MEAN, PoolingKind.FIRST)
NUM_TOKENS = 6
SHARED = prompts([24], vocab_size=256, seed=5)[0]
TEXTS = [*prompts([1, 6, 19, 60], vocab_size=256, seed=7), (*SHARED, 30), (*SHARED, 40, 41, 42)]
SIZES = {"num_blocks": 40, "block_size": 4, "token_budget": 24, "max_rows": 12, "max_model_len": 128}

pytestmark = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")


@dataclass
class Model:
    """A checkpoint with its engine and adapters."""

    engine: TorchEngine
    adapters: dict[str, IngestedAdapter]
    directories: dict[str, Path]
    checkpoint: Path

    def request(self, number: int, prompt: tuple[int, ...], adapter: str, pooling: Pooling | None) -> Request:
        return Request(
            RequestId(number),
            prompt,
            NUM_TOKENS if pooling is None else 1,
            adapter=self.adapters[adapter].ref if adapter else None,
            pooling=pooling,
        )


def make_model(directory: Path, arch: str, dtype: str = "float32") -> Model:
    checkpoint = make_checkpoint(directory / "base", arch=arch)
    directories = make_adapters(checkpoint, directory) if arch != "gpt2" else _gpt2_adapters(checkpoint, directory)
    base_model = BaseModel.load(checkpoint, dtype)
    adapters = {name: ingested(path, base_model) for name, path in directories.items()}
    return Model(build_engine(worker_config(checkpoint, dtype=dtype, **SIZES)), adapters, directories, checkpoint)


def _gpt2_adapters(checkpoint: Path, directory: Path) -> dict[str, Path]:
    targets = {"one": ["c_attn"], "two": ["c_attn", "c_proj", "c_fc"], "three": ["c_fc"]}
    return {
        name: make_adapter(directory / name, checkpoint, rank=rank, targets=targets[name], seed=rank)
        for rank, name in enumerate(targets, start=3)
    }


def expected(oracle: Oracle, prompt: tuple[int, ...], adapter: str, kind: PoolingKind) -> torch.Tensor:
    hidden = oracle.hidden(prompt, adapter)
    return {PoolingKind.LAST: hidden[-1], PoolingKind.MEAN: hidden.mean(dim=0), PoolingKind.FIRST: hidden[0]}[kind]


def check_close(found: Vector | None, truth: torch.Tensor, dtype: str, what: str) -> None:
    assert found is not None, what
    error = float((torch.from_numpy(found.copy()) - truth).norm() / truth.norm())
    assert error <= MAX_ERROR[dtype], f"{what}: relative error {error:.1e}"


@pytest.mark.parametrize(("arch", "dtype"), [*((arch, "float32") for arch in [*ARCHS, "gpt2"]), ("llama", "bfloat16")])
def test_embeddings_beside_generation_are_those_of_transformers_and_peft(arch: str, dtype: str, tmp_path: Path) -> None:
    model = make_model(tmp_path, arch, dtype)
    jobs = [
        (prompt, adapter, pooling)
        for prompt in TEXTS
        for adapter in ["", "one", "two", "three"]
        for pooling in (*map(Pooling, KINDS), None)
    ]
    requests = [model.request(number, *job) for number, job in enumerate(jobs)]
    got, stats = serve(model.engine, requests, list(model.adapters.values()), SchedulerSettings())
    oracle = Oracle(model.checkpoint, model.directories)
    for number, (prompt, adapter, pooling) in enumerate(jobs):
        served = got[number, 0]
        if pooling is None:
            assert len(served.token_ids) == NUM_TOKENS and served.pooled is None
            if dtype == "float32":
                oracle.num_agreed(prompt, served.token_ids, adapter)
            continue
        assert (served.finish_reason, served.token_ids) == (FinishReason.POOLED, [])
        truth = expected(oracle, prompt, adapter, pooling.kind)
        check_close(served.pooled, truth, dtype, f"{pooling.kind} of {len(prompt)} tokens, {adapter!r}")
    assert stats.prefix_hit_tokens > 0


def test_vectors_do_not_depend_on_the_batch_or_the_chunks(tmp_path: Path) -> None:
    model = make_model(tmp_path, "llama")
    jobs = [(prompt, adapter, Pooling(kind)) for prompt in TEXTS for adapter in ["", "two"] for kind in KINDS]
    together, _ = serve(
        model.engine,
        [model.request(number, *job) for number, job in enumerate(jobs)],
        list(model.adapters.values()),
        SchedulerSettings(),
    )
    for number, job in enumerate(jobs):
        for budget in (24, 5):
            alone, _ = serve(
                model.engine,
                [model.request(0, *job)],
                list(model.adapters.values()),
                SchedulerSettings(max_step_tokens=budget),
            )
            first, second = together[number, 0].pooled, alone[0, 0].pooled
            assert first is not None and second is not None
            # A pass of one token multiplies in another order than a larger pass, so the last bits may differ.
            np.testing.assert_allclose(first, second, rtol=0, atol=1e-5, err_msg=f"{job}, budget {budget}")


def classes_of(checkpoint: Path, directory: Path, prompt: tuple[int, ...], num_labels: int) -> torch.Tensor:
    """What transformers' sequence classifier with PEFT returns."""
    base = AutoModelForSequenceClassification.from_pretrained(
        checkpoint, dtype=torch.float32, attn_implementation="eager", num_labels=num_labels
    ).eval()
    model = PeftModel.from_pretrained(base, str(directory)).eval()
    # pad_token_id 0 is in no prompt, so the last token is the last that is not padding.
    with torch.inference_mode():
        logits: torch.Tensor = model(input_ids=torch.tensor([list(prompt)])).logits[0].float()
    return logits


@pytest.mark.parametrize("arch", ["llama", "mistral", "qwen2", "qwen3", "gemma2", "opt", "gpt2", "phi3", "mixtral"])
def test_classes_beside_embeddings_and_generation_are_those_of_transformers_and_peft(arch: str, tmp_path: Path) -> None:
    model = make_model(tmp_path, arch)
    targets = {"gpt2": ["c_attn"], "phi3": ["qkv_proj"]}.get(arch, ["q_proj", "v_proj"])
    heads = {"three labels": 3, "reward": 1}
    base_model = BaseModel.load(model.checkpoint)
    for seed, (name, num_labels) in enumerate(heads.items()):
        path = make_classifier(
            tmp_path / name,
            model.checkpoint,
            num_labels=num_labels,
            target_modules=targets,
            seed=seed,
            fan_in_fan_out=arch == "gpt2",
        )
        model.directories[name], model.adapters[name] = path, ingested(path, base_model)
        assert len(model.adapters[name].info.labels) == num_labels
    jobs: list[tuple[tuple[int, ...], str, Pooling | None]] = []
    for prompt in TEXTS:
        jobs += [(prompt, name, Pooling(PoolingKind.LAST, num_labels)) for name, num_labels in heads.items()]
        jobs += [(prompt, "two", None), (prompt, "three labels", None), (prompt, "reward", Pooling())]
    requests = [model.request(number, *job) for number, job in enumerate(jobs)]
    got, _ = serve(model.engine, requests, list(model.adapters.values()), SchedulerSettings())
    for number, (prompt, adapter, pooling) in enumerate(jobs):
        if pooling is not None and pooling.num_labels:
            truth = classes_of(model.checkpoint, model.directories[adapter], prompt, pooling.num_labels)
            check_close(got[number, 0].pooled, truth, "float32", f"{len(prompt)} tokens, {adapter}")
    model.engine.arena.check_invariants()
    model.engine.reset()
    assert model.engine.arena.used_bytes() == 0
