"""Adapters on experts and routers, from their files through the registry's ingest and the real engine.

The truth is transformers with PEFT where PEFT loads the file, else the model with merged weights. Base rows, adapters
on linears and all forms on experts share each batch; in a second round every slot holds another adapter.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from control_plane.registry.model.base_model import BaseModel
from data_plane.engine.build import build_engine
from data_plane.engine.engine import TorchEngine
from tests.data_plane.engine.expert_files import merged, write_one_by_one
from tests.data_plane.engine.planner import Job, Planner
from tests.data_plane.engine.test_oracle import worker_config
from tests.e2e.scheduled import IngestedAdapter, ingested, reported_by
from tests.makers import make_adapter, make_checkpoint, make_prompt
from tests.oracle import GreedyCompletion, Oracle

pytestmark = pytest.mark.filterwarnings(
    "ignore:.is_gradient_checkpointing. is deprecated:FutureWarning",
    "ignore:.*target_parameters",
    "ignore:.*did not match any targeted",
)

ARCHS = ("mixtral", "qwen3_moe", "qwen2_moe", "gpt_oss", "olmoe")
NUM_TOKENS = 5
PROMPT_LENGTHS = (1, 6, 23)
FUSED = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
# Of float32 logits of up to about 20: sums of another order, and W + B A rounded where PEFT merges it.
LOGITS_TOLERANCE = 2e-3


@dataclass(frozen=True)
class Mixture:
    """A checkpoint, its engine, and adapters with what is true of each."""

    checkpoint: Path
    base_model: BaseModel
    engine: TorchEngine
    adapters: dict[str, IngestedAdapter]
    oracles: dict[str, Oracle]  # "" is the base model; an oracle may know its adapter as "adapter" or have it merged

    def name_in_oracle(self, name: str) -> str:
        return "" if name in ("", "merged") or name.startswith("one by one") else "adapter"


def fused_forms(arch: str) -> dict[str, dict[str, Any]]:
    """Adapters that PEFT itself makes."""
    router = {"gpt_oss": "router.weight"}.get(arch, "gate.weight")
    forms: dict[str, dict[str, Any]] = {
        "linears": {"targets": ["q_proj", "v_proj"], "rank": 8},
        "fused": {"targets": ["o_proj"], "target_parameters": FUSED, "rank": 4},
        "down": {"targets": [], "target_parameters": ["mlp.experts.down_proj"], "rank": 9, "rslora": True},
        "ranks": {
            "targets": [],
            "target_parameters": ["gate_up_proj"],
            "rank_pattern": {"layers.1.mlp.experts.gate_up_proj": 2},
            "alpha_pattern": {"experts.gate_up_proj": 5},
        },
        "choice": {"targets": ["k_proj"], "target_parameters": [router], "rank": 4},
        "all": {"targets": [], "target_parameters": [*FUSED, router], "rank": 3},
    }
    if arch == "qwen2_moe":
        forms["one column"] = {"targets": ["shared_expert_gate", "up_proj"], "rank": 4}
    return forms


def make_mixture(directory: Path, arch: str, **settings: Any) -> Mixture:
    checkpoint = make_checkpoint(directory / "model", arch)
    base_model = BaseModel.load(checkpoint)
    engine = build_engine(worker_config(checkpoint, num_slots=12, **settings))
    reported = reported_by(engine)
    paths = {
        name: make_adapter(directory / name, checkpoint, seed=seed, **form)
        for seed, (name, form) in enumerate(fused_forms(arch).items())
    }
    oracles = {"": Oracle(checkpoint, {})}
    oracles |= {name: Oracle(checkpoint, {"adapter": path}) for name, path in paths.items()}
    one_by_one: dict[str, dict[str, Any]] = {
        "one by one": {"linears": ["q_proj"]},
        "one by one, some": {"experts": [0, 3], "parts": ["up_proj", "down_proj"], "use_rslora": True, "rank": 9},
    }
    if arch == "gpt_oss":
        one_by_one["one by one"] = {"parts": ["gate_up_proj", "down_proj"], "linears": ["q_proj"]}
    else:
        one_by_one["one by one, dora"] = {"use_dora": True, "linears": ["v_proj"]}
    for seed, (name, form) in enumerate(one_by_one.items(), start=20):
        paths[name] = write_one_by_one(directory / name, checkpoint, seed=seed, **form)
        oracles[name] = Oracle(merged(directory / f"{name} merged", checkpoint, paths[name]), {})
    adapters = {name: ingested(path, base_model, reported) for name, path in paths.items()}
    return Mixture(checkpoint, base_model, engine, adapters, oracles)


def load(engine: TorchEngine, slot: int, generation: int, adapter: IngestedAdapter) -> None:
    used = engine.slots.used_bytes()
    engine.slots.load(slot, generation, adapter.info.digest, adapter)
    assert engine.slots.used_bytes() - used == adapter.info.arena_bytes


def check_tokens(mixture: Mixture) -> None:
    """Two rounds of mixed batches, in the second of which every slot has another adapter."""
    prompts = [make_prompt(seed, length) for seed, length in enumerate(PROMPT_LENGTHS)]
    names, engine = list(mixture.adapters), mixture.engine
    completions: dict[tuple[int, str], GreedyCompletion] = {
        (index, name): mixture.oracles[name].greedy(prompt, NUM_TOKENS, mixture.name_in_oracle(name))
        for index, prompt in enumerate(prompts)
        for name in ["", *names]
    }
    assert len({tuple(completions[2, name].token_ids) for name in ["", *names]}) > len(names) // 2, "no effect"
    for generation in (1, 2):
        slots: dict[str, int | None] = {"": None}
        for slot, name in enumerate(names[generation - 1 :] + names[: generation - 1]):
            if generation > 1:
                engine.slots.evict(slot, generation - 1)
            load(engine, slot, generation, mixture.adapters[name])
            slots[name] = slot
        pairs = [
            (Job(prompts[index], NUM_TOKENS, slots[name], generation), name, completion)
            for (index, name), completion in completions.items()
            if completion.is_decisive
        ]
        assert len(pairs) >= 0.6 * len(completions)
        Planner(engine, chunk=7, max_running=9).run([job for job, _, _ in pairs])
        for job, name, completion in pairs:
            assert job.tokens == completion.token_ids, (name, len(job.prompt), generation)
    engine.reset()
    assert engine.slots.used_bytes() == 0


@pytest.mark.parametrize(
    ("arch", "lora_form"),
    [(arch, "native") for arch in ARCHS] + [("gpt_oss", "torch"), ("mixtral", "torch")],
    indirect=["lora_form"],
)
@pytest.mark.usefixtures("lora_form")
def test_experts_and_routers_generate_as_peft(arch: str, tmp_path: Path) -> None:
    check_tokens(make_mixture(tmp_path, arch))
