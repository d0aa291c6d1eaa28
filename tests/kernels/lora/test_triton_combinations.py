"""Rows that combine adapters, scale one or activate one late: the engine with Triton's LoRA kernels.

Beside all other kinds of rows. One layer and few tokens, since an interpreter takes milliseconds for each program.
tests/gpu/test_combinations.py has whole generations.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from control_plane.registry.model.base_model import BaseModel
from control_plane.registry.versions.invocation import last_occurrence
from data_plane.engine.build import build_engine
from data_plane.plan import RowSampling
from tests.data_plane.engine.planner import Job, Planner, make_plan
from tests.data_plane.engine.test_combinations import COMBINATIONS, check_logits, serve
from tests.data_plane.engine.test_oracle import worker_config
from tests.e2e.scheduled import ingested
from tests.e2e.test_scheduled_activation import Truth
from tests.makers import make_adapter, make_checkpoint

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
