"""Forms of LoRA beside the plain one, from PEFT's directory through the registry's ingest and the real engine.

Base rows, plain adapters and all others share each batch; in a second round every slot holds another kind.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from control_plane.registry.model.base_model import BaseModel
from control_plane.registry.peft.ingest import CONFIG_FILE
from data_plane.engine.build import build_engine
from tests.data_plane.engine.planner import Job, Planner
from tests.data_plane.engine.test_oracle import worker_config
from tests.e2e.distributions import check_distributions
from tests.e2e.scheduled import ingested
from tests.makers import make_adapter, make_checkpoint, make_converted, make_prompt
from tests.oracle import GreedyCompletion, Oracle

NUM_TOKENS = 6
PROMPT_LENGTHS = (1, 6, 23)


def check_forms(
    directory: Path,
    arch: str,
    forms: dict[str, dict[str, Any]],
    *,
    sizes: dict[str, Any] | None = None,
    converted: Sequence[str] = (),
    device: str = "cpu",
    registered: Callable[[str, Path, Path], Path] | None = None,
) -> None:
    """Every adapter and the base give in two mixed batches the tokens of transformers and PEFT alone.

    `converted` are values of init_lora_weights of further adapters, which PEFT converts to plain LoRA.
    `registered` gives for a name, PEFT's directory and the checkpoint the directory that is ingested instead.
    """
    checkpoint = make_checkpoint(directory / "model", arch, **(sizes or {}))
    base_model = BaseModel.load(checkpoint)
    paths = {
        name: make_adapter(directory / name, checkpoint, seed=seed, **form)
        for seed, (name, form) in enumerate(forms.items())
    }
    paths |= {init: make_converted(directory / init, checkpoint, init) for init in converted}
    adapters = {
        name: ingested(registered(name, path, checkpoint) if registered else path, base_model)
        for name, path in paths.items()
    }
    engine = build_engine(worker_config(checkpoint, device=device))
    prompts = [make_prompt(seed, length) for seed, length in enumerate(PROMPT_LENGTHS)]
    # PEFT puts trained biases into the base model itself: such an adapter has an oracle of its own.
    together = {name: path for name, path in paths.items() if forms.get(name, {}).get("bias", "none") == "none"}
    oracles = {name: Oracle(checkpoint, {name: paths[name]}) for name in paths.keys() - together.keys()}
    oracle = Oracle(checkpoint, together)
    completions: dict[tuple[int, str | None], GreedyCompletion] = {
        (index, name): oracles.get(name or "", oracle).greedy(prompt, NUM_TOKENS, name)
        for index, prompt in enumerate(prompts)
        for name in [None, *adapters]
    }
    assert len({tuple(completions[2, name].token_ids) for name in [None, *adapters]}) > len(adapters) // 2, "no effect"
    names = list(adapters)
    for generation in (1, 2):
        slots: dict[str | None, int | None] = {None: None}
        for slot, loaded in enumerate(names[generation - 1 :] + names[: generation - 1]):
            if generation > 1:
                engine.slots.evict(slot, generation - 1)
            used = engine.slots.used_bytes()
            engine.slots.load(slot, generation, adapters[loaded].info.digest, adapters[loaded])
            assert engine.slots.used_bytes() - used == adapters[loaded].info.arena_bytes
            slots[loaded] = slot
        pairs = [
            (Job(prompts[index], NUM_TOKENS, slots[name], generation), name, completion)
            for (index, name), completion in completions.items()
            if completion.is_decisive
        ]
        assert len(pairs) >= 0.6 * len(completions)
        Planner(engine, chunk=7, max_running=9).run([job for job, _, _ in pairs])
        for job, name, completion in pairs:
            assert job.tokens == completion.token_ids, (name, len(job.prompt), generation)
    check_distributions(
        engine, adapters, lambda name, ids: oracles.get(name or "", oracle).logits(ids, name), prompts, num_tokens=2
    )


NAMED: dict[str, dict[str, dict[str, Any]]] = {
    "llama": {
        "plain": {"rank": 8},
        "expression": {"rank": 4, "targets": r".*\.(self_attn|mlp)\.(q|up)_proj"},
        "one layer": {
            "rank": 6,
            "targets": ["q_proj", "v_proj"],
            "layers_to_transform": [1],
            "layers_pattern": "layers",
        },
        "left out": {"rank": 3, "targets": ["q_proj", "o_proj"], "exclude_modules": r".*\.0\..*o_proj"},
        "ranks": {"rank": 4, "targets": ["q_proj", "k_proj"], "rank_pattern": {r".*1\.self_attn\.q.*": 9}},
        # PEFT sorts the keys when it saves.
        "alphas": {
            "rank": 5,
            "targets": ["v_proj"],
            "alpha_pattern": {r"^model\.layers\.0\.self_attn\.v_proj$": 2, "v_proj": 30, "v_proj|o_proj": 1},
            "rslora": True,
        },
    },
    "gpt2": {
        "plain": {"rank": 8},
        "one layer": {"rank": 6, "targets": ["c_attn"], "layers_to_transform": 0, "layers_pattern": "h"},
        "expression": {"rank": 4, "targets": r"transformer\.h\.1\.(attn|mlp)\.c_.*"},
    },
}


@pytest.mark.parametrize(("arch", "lora_form"), [("llama", "native"), ("gpt2", "torch")], indirect=["lora_form"])
@pytest.mark.usefixtures("lora_form")
@pytest.mark.filterwarnings("ignore:.*changes the base weights of the model")
def test_modules_that_expressions_and_layers_choose_generate_as_peft(arch: str, tmp_path: Path) -> None:
    check_forms(tmp_path, arch, NAMED[arch], converted=["pissa", "olora"] if arch == "llama" else [])


def vector_forms(arch: str) -> dict[str, dict[str, Any]]:
    """LoRA bias and DoRA beside plain adapters."""
    some = {"phi3": ["qkv_proj"], "opt": ["v_proj", "fc1"]}.get(arch, ["v_proj", "gate_proj"])
    return {
        "plain": {"rank": 8},
        "dora": {"rank": 4, "alpha": 8, "use_dora": True},
        "bias": {"rank": 5, "lora_bias": True},
        "rsdora": {
            "rank": 9,
            "alpha": 4,
            "rslora": True,
            "use_dora": True,
            "targets": [*some, "o_proj" if arch != "opt" else "out_proj"],
            "rank_pattern": {some[0]: 3},
            "alpha_pattern": {some[0]: 7},
        },
        "some": {"rank": 16, "alpha": 16, "targets": some},
    }


def outer_forms(embedding: str, linear: str) -> dict[str, dict[str, Any]]:
    """The head with and without the embedding, DoRA of both, beside a plain adapter."""
    return {
        "plain": {"rank": 8},
        "head": {"rank": 5, "targets": ["lm_head"], "scale_b": 0.6},
        "embedding": {"rank": 9, "targets": [embedding, linear], "rslora": True},
        "dora": {"rank": 4, "targets": [embedding, "lm_head", linear], "use_dora": True},
    }


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.mark.parametrize(
    ("arch", "lora_form"),
    [("llama", "torch"), ("llama", "native"), ("qwen2", "native"), ("opt", "torch"), ("phi3", "native")],
    indirect=["lora_form"],
)
@pytest.mark.usefixtures("lora_form")
@pytest.mark.filterwarnings("ignore:.*merging LoRA weights won't be possible", "ignore:.*have invalid shape")
def test_lora_bias_and_dora_generate_as_peft(arch: str, tmp_path: Path) -> None:
    """Without and with biases of the base, over linears that were fused, and over those of the checkpoint."""
    check_forms(tmp_path, arch, vector_forms(arch))


# Odd vocabularies are not a whole number of pages' columns.
OUTER_CASES: dict[str, tuple[str, dict[str, Any], str]] = {
    "untied": ("llama", {}, "embed_tokens"),
    "tied, scaled": ("gemma3", {"vocab_size": 259}, "embed_tokens"),
    "tied, odd": ("opt", {"vocab_size": 259}, "embed_tokens"),
    "bias": ("qwen2", {"tie_word_embeddings": True}, "embed_tokens"),
    "other names": ("gpt_neox", {"vocab_size": 257}, "embed_in"),
    "bias of the head": ("phi", {}, "embed_tokens"),
}


@pytest.mark.parametrize(
    ("case", "lora_form"),
    [(case, ("native", "torch")[index % 2]) for index, case in enumerate(OUTER_CASES)]
    + [("untied", "torch"), ("bias of the head", "native")],
    indirect=["lora_form"],
)
@pytest.mark.usefixtures("lora_form")
@pytest.mark.filterwarnings("ignore:.*save_embedding_layers", "ignore:Model has `tie_word_embeddings=True`")
@pytest.mark.filterwarnings("ignore:Model with `tie_word_embeddings=True`")
def test_head_and_embedding_generate_as_peft(case: str, tmp_path: Path) -> None:
    arch, sizes, embedding = OUTER_CASES[case]
    linear = {"gpt_neox": "dense_h_to_4h"}.get(arch, "v_proj")
    check_forms(tmp_path, arch, outer_forms(embedding, linear), sizes=sizes)


BIASED: dict[str, dict[str, dict[str, Any]]] = {
    "qwen2": {
        "plain": {"rank": 8},
        "lora only": {"rank": 4, "bias": "lora_only", "targets": ["q_proj", "o_proj"]},
        "all": {"rank": 6, "bias": "all", "targets": ["v_proj", "up_proj"], "rslora": True},
        "dora": {"rank": 5, "bias": "all", "targets": ["q_proj"], "use_dora": True},
        "both biases": {"rank": 3, "bias": "lora_only", "targets": ["k_proj"], "lora_bias": True},
        "without LoRA there": {"rank": 2, "bias": "all", "targets": ["down_proj"]},
    },
    "gpt2": {
        "plain": {"rank": 8},
        "lora only": {"rank": 4, "bias": "lora_only", "targets": ["c_attn", "c_proj"]},
        "dora": {"rank": 5, "bias": "lora_only", "targets": ["c_fc"], "use_dora": True},
    },
    "opt": {
        "plain": {"rank": 8},
        "lora only": {"rank": 4, "bias": "lora_only", "targets": ["q_proj", "fc1"]},
        "dora": {"rank": 5, "bias": "lora_only", "targets": ["v_proj", "fc2"], "use_dora": True},
    },
    "phi": {
        "plain": {"rank": 8},
        "head": {"rank": 4, "bias": "lora_only", "targets": ["lm_head", "dense"]},
    },
}


@pytest.mark.parametrize(
    ("arch", "lora_form"),
    [(arch, ("native", "torch")[index % 2]) for index, arch in enumerate(BIASED)] + [("qwen2", "torch")],
    indirect=["lora_form"],
)
@pytest.mark.usefixtures("lora_form")
@pytest.mark.filterwarnings("ignore:.*merging LoRA weights won't be possible", "ignore:.*save_embedding_layers")
@pytest.mark.filterwarnings("ignore:Careful, disabling adapter layers with bias", "ignore:.*have invalid shape")
def test_trained_biases_of_the_base_generate_as_peft(arch: str, tmp_path: Path) -> None:
    check_forms(tmp_path, arch, BIASED[arch])


def plainest_forms() -> dict[str, dict[str, Any]]:
    """What PEFT writes for its plainest configuration, and for fields that change nothing of a trained adapter."""
    from peft import EvaConfig
    from peft.tuners.lora.config import CordaConfig

    return {
        "plain": {"rank": 8},
        "no task": {"rank": 8, "task_type": None},  # PEFT writes auto_mapping
        "another task": {"rank": 4, "task_type": "SEQ_2_SEQ_LM"},
        "eva": {"rank": 4, "init_lora_weights": "eva", "eva_config": EvaConfig(rho=1.5)},
        "corda left over": {"rank": 4, "corda_config": CordaConfig(), "revision": "main"},
        "bias": {"rank": 4, "bias": "all"},
        "tying": {"rank": 4, "ensure_weight_tying": True, "targets": ["v_proj"]},
        "fan in": {"rank": 6, "fan_in_fan_out": True, "targets": ["embed_tokens"]},
    }


@pytest.mark.filterwarnings(
    "ignore:.*ensure_weight_tying", "ignore:.*corda_config", "ignore:.*save_embedding_layers", "ignore:.*[Ee][Vv][Aa]"
)
def test_what_peft_writes_from_its_plainest_configurations_generates_as_peft(tmp_path: Path) -> None:
    check_forms(tmp_path, "llama", plainest_forms())
    written = {
        path.name: json.loads((path / CONFIG_FILE).read_text()) for path in tmp_path.iterdir() if path.name != "model"
    }
    assert written["no task"]["auto_mapping"]["base_model_class"] == "LlamaForCausalLM"
    assert written["eva"]["eva_config"]["rho"] == 1.5 and written["corda left over"]["corda_config"]
    assert written["fan in"]["fan_in_fan_out"] and written["bias"]["bias"] == "all"


def test_other_tasks_and_starts_generate_as_peft(tmp_path: Path) -> None:
    forms: dict[str, dict[str, Any]] = {
        "classes": {"rank": 4, "task_type": "SEQ_CLS"},  # PEFT adds modules_to_save, which this model has not
        "tokens": {"rank": 2, "task_type": "TOKEN_CLS"},
        "questions": {"rank": 6, "task_type": "QUESTION_ANS"},
        "mica": {"rank": 4, "init_lora_weights": "mica"},
        "orthogonal": {"rank": 4, "init_lora_weights": "orthogonal"},
    }
    check_forms(tmp_path, "llama", forms)
    written = {name: json.loads((tmp_path / name / CONFIG_FILE).read_text()) for name in forms}
    assert written["classes"]["modules_to_save"] == written["tokens"]["modules_to_save"] == ["classifier", "score"]
    assert written["questions"]["modules_to_save"] == ["qa_outputs"]
    assert written["mica"]["init_lora_weights"] == "mica"


@pytest.mark.filterwarnings("ignore:fan_in_fan_out is set to True")
@pytest.mark.filterwarnings("ignore:The configuration file contains a `runtime_config` key")
@pytest.mark.filterwarnings("ignore:Unexpected keyword arguments")
def test_fields_that_others_write_generate_as_peft_reads_them(tmp_path: Path) -> None:
    """By other versions of PEFT and by trainers: PEFT corrects or ignores them when it loads the adapter."""
    checkpoint = make_checkpoint(tmp_path / "model")
    base_model = BaseModel.load(checkpoint)
    path = make_adapter(tmp_path / "adapter", checkpoint)
    plain = ingested(path, base_model)
    config = json.loads((path / CONFIG_FILE).read_text())
    added = {
        "fan_in_fan_out": True,
        "runtime_config": {"ephemeral_gpu_offload": False},
        "lorap_emb_lr": 1e-6,
        "lora_dtype": "float32",
        "merge_weights": False,
    }
    prompt = make_prompt(1, 12)
    before = Oracle(checkpoint, {"a": path}).logits(prompt, "a")
    (path / CONFIG_FILE).write_text(json.dumps(config | added))
    assert torch.equal(Oracle(checkpoint, {"a": path}).logits(prompt, "a"), before)
    assert ingested(path, base_model) == plain
