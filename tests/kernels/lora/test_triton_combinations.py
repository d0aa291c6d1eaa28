"""Rows that combine adapters, scale one, activate one late or are pooled: the engine with Triton's LoRA kernels.

Beside all other kinds of rows. One layer and few tokens, since an interpreter takes milliseconds for each program.
tests/gpu/test_combinations.py has whole generations.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from control_plane.registry.model.base_model import BaseModel
from control_plane.registry.versions.invocation import last_occurrence
from control_plane.scheduler.settings import SchedulerSettings
from control_plane.scheduler.types import Pooling, PoolingKind
from data_plane.engine.build import build_engine
from data_plane.plan import RowSampling
from tests.data_plane.engine.planner import Job, Planner, make_plan
from tests.data_plane.engine.test_combinations import COMBINATIONS, check_logits, serve
from tests.data_plane.engine.test_oracle import worker_config
from tests.e2e.scheduled import ingested, serve as serve_requests
from tests.e2e.test_scheduled_activation import Truth
from tests.e2e.test_scheduled_pooling import Model, check_close, classes_of, expected
from tests.makers import make_adapter, make_checkpoint, make_classifier
from tests.oracle import Oracle

pytestmark = [
    pytest.mark.filterwarnings("ignore:Setting `save_embedding_layers`", "ignore:.*save_embedding_layers"),
    pytest.mark.filterwarnings("ignore:.*merging LoRA weights won't be possible", "ignore:.*have invalid shape"),
]

# Rows that PEFT does not combine, in the same steps.
OTHERS = {
    "dora": {"rank": 6, "use_dora": True, "targets": ["q_proj", "down_proj"]},
    "biased": {"rank": 4, "lora_bias": True, "targets": ["v_proj", "up_proj"]},
    "tokens": {"rank": 3, "targets": ["k_proj"], "trainable_token_indices": [7, 9]},
}


@pytest.fixture
def triton_lora(monkeypatch: pytest.MonkeyPatch) -> None:
    """LoRA of engines in Triton's kernels, all else as on a CPU."""
    for module in ("kernels.lora.ops", "data_plane.adapters.step.adapter_steps"):
        monkeypatch.setattr(f"{module}.runs_triton", lambda tensor: True)
    monkeypatch.setattr("data_plane.layers.recorded_layers.has_native", lambda *tensors: False)


@pytest.mark.usefixtures("triton_lora")
def test_logits_of_combinations_are_pefts_beside_all_other_rows(tmp_path: Path) -> None:
    served = serve("llama", tmp_path, further=OTHERS, sizes={"num_hidden_layers": 1}, num_slots=9)
    served.load(first=1)
    sampling = RowSampling(temperature=0.0, top_k=0, top_p=1.0, seed=0, num_logprobs=256)
    names: list[str | None] = [None, "third", *OTHERS, *COMBINATIONS]
    served.prompts = [[7], [30]]
    jobs = [served.job(place % 2, name, sampling=sampling) for place, name in enumerate(names)]
    planner = Planner(served.engine, chunk=64)
    new = [planner.admit(job) for job in jobs]
    output = served.engine.execute(make_plan(1, new=new, prefills=[(job.row, 1) for job in jobs]))
    by_row = {logprobs.row: logprobs for logprobs in output.sampled_logprobs}
    for job, name in zip(jobs, names, strict=True):
        check_logits(served, by_row[job.row], job.prompt, name)


@pytest.mark.usefixtures("triton_lora")
def test_combinations_decode_as_in_peft_after_their_prompts_in_chunks(tmp_path: Path) -> None:
    served = serve("llama", tmp_path, sizes={"num_hidden_layers": 1}, num_slots=9)
    served.load(first=2)
    served.prompts = [[7, 60, 201]]
    names: list[str | None] = [None, "two", "negative", "scaled"]
    jobs = [dataclasses.replace(served.job(0, name), num_tokens=2) for name in names]
    Planner(served.engine, chunk=2).run(jobs)
    for job, name in zip(jobs, names, strict=True):
        served.oracle.num_agreed(job.prompt, job.tokens, name)
        assert len(job.tokens) == 2
    assert len({tuple(job.tokens) for job in jobs}) > 2, "no effect"
    assert served.engine.num_scaled_columns == 0


@pytest.mark.usefixtures("triton_lora")
def test_embeddings_and_classes_are_those_of_transformers_and_peft(tmp_path: Path) -> None:
    checkpoint = make_checkpoint(tmp_path / "model", "llama", num_hidden_layers=1)
    directories = {
        "plain": make_adapter(tmp_path / "plain", checkpoint, rank=5, seed=1),
        "mood": make_classifier(tmp_path / "mood", checkpoint, num_labels=3, target_modules=["q_proj", "down_proj"]),
    }
    adapters = {name: ingested(path, BaseModel.load(checkpoint)) for name, path in directories.items()}
    engine, oracle = build_engine(worker_config(checkpoint)), Oracle(checkpoint, {"plain": directories["plain"]})
    model = Model(engine, adapters, directories, checkpoint)
    last, mean = Pooling(PoolingKind.LAST), Pooling(PoolingKind.MEAN)
    prompts = ((9, 31, 200, 5, 77), (40,))
    jobs = [(prompt, name, pooling) for prompt in prompts for name in ("", "plain") for pooling in (last, mean)]
    jobs += [(prompt, "mood", Pooling(PoolingKind.LAST, 3)) for prompt in prompts]
    requests = [model.request(number, *job) for number, job in enumerate(jobs)]
    requests.append(dataclasses.replace(model.request(len(jobs), prompts[0], "plain", None), max_tokens=2))
    got, _ = serve_requests(engine, requests, list(adapters.values()), SchedulerSettings(max_step_tokens=8))
    for number, (prompt, name, pooling) in enumerate(jobs):
        truth = (
            classes_of(checkpoint, directories[name], prompt, 3)
            if pooling.num_labels
            else expected(oracle, prompt, name, pooling.kind)
        )
        check_close(got[number, 0].pooled, truth, "float32", f"{pooling} of {len(prompt)} tokens, {name!r}")
    oracle.num_agreed(prompts[0], got[len(jobs), 0].token_ids, "plain")


@pytest.mark.usefixtures("triton_lora")
def test_an_activated_adapter_acts_from_its_tokens_on_as_in_peft(tmp_path: Path) -> None:
    checkpoint, tokens = make_checkpoint(tmp_path / "model", "llama", num_hidden_layers=1), [201, 17]
    path = make_adapter(tmp_path / "adapter", checkpoint, rank=5, seed=1, alora_invocation_tokens=tokens)
    adapter, engine = ingested(path, BaseModel.load(checkpoint)), build_engine(worker_config(checkpoint))
    engine.slots.load(0, 1, adapter.info.digest, adapter)
    prompts = [[9, *tokens, 30, *tokens, 4], [5, 6, *tokens]]
    jobs = [Job(prompt, 2, 0, 1, active_from=last_occurrence(prompt, tokens) or 0) for prompt in prompts]
    plain = Job(prompts[0], 2)
    Planner(engine, chunk=4).run([*jobs, plain])
    truth = Truth(checkpoint, {"adapter": path})
    generated = [job.tokens for job in (*jobs, plain)]
    assert generated == [
        *(truth.generated("adapter", each)[0][:2] for each in prompts),
        truth.generated(None, prompts[0])[0][:2],
    ]
    assert generated[0] != generated[2]
