"""Configurations as trainers publish them, in corpus/: each is accepted or refused as its row says.

A file has the fields that a tool always writes, over the defaults of a version of PEFT (corpus/peft_versions.json, read
from PEFT's tags). A case changes some. The tensors are made here, for a tiny model with the modules of a real one:

    on          names or suffixes of the modules that have tensors; default: those that target_modules lists
    layers      only these layers
    rank, ranks another rank than `r`; by part of the module's name
    parts       "dora" or "bias" in place of what the configuration says
    replace     pairs of texts in the tensors' names; drop: a part of the names that are left out
    extra       further tensors by name, and their shapes
    zeros, nan  a part of the names of tensors that hold zeros, or a NaN
    dtype       F32, F16 or BF16; hidden: another hidden size than the model's
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from contract.expert_names import of_expert
from control_plane.errors import InvalidAdapter
from control_plane.registry.model.embedding_modules import CheckpointTensor
from control_plane.registry.model.served_modules import ModuleKind, Modules, ServedModule
from control_plane.registry.peft.ingest import CONFIG_FILE, WEIGHTS_FILE
from tests.control_plane.registry.rig import base_model, pack, with_header

CORPUS = Path(__file__).parent / "corpus"
VERSIONS: dict[str, dict[str, Any]] = json.loads((CORPUS / "peft_versions.json").read_text("utf-8"))
HIDDEN, KV, FFN, VOCAB, EXPERTS = 16, 8, 32, 40, 4
_ATTENTION = {"q_proj": (HIDDEN, HIDDEN), "k_proj": (HIDDEN, KV), "v_proj": (HIDDEN, KV), "o_proj": (HIDDEN, HIDDEN)}
_GATED = {"gate_proj": (HIDDEN, FFN), "up_proj": (HIDDEN, FFN), "down_proj": (FFN, HIDDEN)}
_LLAMA = {f"self_attn.{name}": size for name, size in _ATTENTION.items()} | {f"mlp.{n}": s for n, s in _GATED.items()}
# By model: the path of the layers, their linears with (in, out), the embedding.
_MODELS: dict[str, tuple[str, dict[str, tuple[int, int]], str]] = {
    "llama": ("model.layers", _LLAMA, "model.embed_tokens"),
    "qwen2": ("model.layers", _LLAMA, "model.embed_tokens"),
    "qwen3_moe": ("model.layers", {k: v for k, v in _LLAMA.items() if "attn" in k}, "model.embed_tokens"),
    "phi3": (
        "model.layers",
        {
            "self_attn.qkv_proj": (HIDDEN, HIDDEN + 2 * KV),
            "self_attn.o_proj": (HIDDEN, HIDDEN),
            "mlp.gate_up_proj": (HIDDEN, 2 * FFN),
            "mlp.down_proj": (FFN, HIDDEN),
        },
        "model.embed_tokens",
    ),
    "opt": (
        "model.decoder.layers",
        {f"self_attn.{name}_proj": (HIDDEN, HIDDEN) for name in ("q", "k", "v", "out")}
        | {"fc1": (HIDDEN, FFN), "fc2": (FFN, HIDDEN)},
        "model.decoder.embed_tokens",
    ),
    "gpt2": (
        "transformer.h",
        {
            "attn.c_attn": (HIDDEN, 3 * HIDDEN),
            "attn.c_proj": (HIDDEN, HIDDEN),
            "mlp.c_fc": (HIDDEN, FFN),
            "mlp.c_proj": (FFN, HIDDEN),
        },
        "transformer.wte",
    ),
    "gpt_neox": (
        "gpt_neox.layers",
        {
            "attention.query_key_value": (HIDDEN, 3 * HIDDEN),
            "attention.dense": (HIDDEN, HIDDEN),
            "mlp.dense_h_to_4h": (HIDDEN, FFN),
            "mlp.dense_4h_to_h": (FFN, HIDDEN),
        },
        "gpt_neox.embed_in",
    ),
}


def modules_of(model: str) -> Modules:
    """What a worker reports of the model."""
    layers, linears, embedding = _MODELS[model]
    found = {
        f"{layers}.{layer}.{name}": ServedModule(ModuleKind.LINEAR, *size)
        for layer in range(2)
        for name, size in linears.items()
    }
    if model == "qwen3_moe":
        for layer in range(2):
            found[f"{layers}.{layer}.mlp.gate"] = ServedModule(ModuleKind.ROUTER, HIDDEN, EXPERTS)
            for part, sides in (("gate", (HIDDEN, FFN)), ("up", (HIDDEN, FFN)), ("down", (FFN, HIDDEN))):
                name = f"{layers}.{layer}.mlp.experts.*.{part}_proj"
                found[name] = ServedModule(ModuleKind.EXPERT, *sides, num_experts=EXPERTS)
    found[embedding] = ServedModule(ModuleKind.EMBEDDING, VOCAB, HIDDEN)
    found["lm_head"] = ServedModule(ModuleKind.HEAD, HIDDEN, VOCAB)
    return found


def cases() -> Iterator[Any]:
    for path in sorted(CORPUS.glob("*.json")):
        if path.name == "peft_versions.json":
            continue
        tool = json.loads(path.read_text("utf-8"))
        for case in tool["cases"]:
            version = case.get("peft", tool["peft"])
            defaults = VERSIONS[version] if version else {}
            config = defaults | tool["fields"] | case.get("fields", {})
            yield pytest.param(config, case, id=f"{tool['tool']}: {case['name']}")


def weights(config: dict[str, Any], model: Modules, spec: dict[str, Any]) -> bytes:
    """The tensors of a case as a safetensors file."""
    generator = np.random.default_rng(0)
    content: dict[str, np.ndarray[Any, Any]] = {}
    part = spec.get("parts", "dora" if config.get("use_dora") else "bias" if config.get("lora_bias") else "")
    names = spec.get("on", config["target_modules"])
    if "fused" in spec:  # the rank of its tensors
        content |= fused(config["target_parameters"], model, spec["fused"], generator)
    each = {expert: module for name, module in model.items() for expert in experts_of(name, module, spec)}
    for name, module in each.items():
        is_adapted = not module.reason and any(name == on or name.endswith("." + on) for on in names)
        if not is_adapted or (not any(f".{layer}." in name for layer in spec.get("layers", [""])) and "layers" in spec):
            continue
        ranks = [rank for text, rank in spec.get("ranks", {}).items() if text in name]
        rank = ranks[0] if ranks else spec.get("rank", config["r"])
        in_features = spec.get("hidden", module.in_features) if module.in_features == HIDDEN else module.in_features
        a, b = ("embedding_A", "embedding_B") if module.kind is ModuleKind.EMBEDDING else ("A.weight", "B.weight")
        prefix = f"base_model.model.{name}.lora_"
        content[prefix + a] = generator.standard_normal((rank, in_features))
        content[prefix + b] = generator.standard_normal((module.out_features, rank))
        if part == "dora":
            content[prefix + "magnitude_vector"] = generator.random(module.out_features)
        if part == "bias":
            content[prefix + "B.bias"] = generator.random(module.out_features)
    for name, values in content.items():
        if "zeros" in spec and spec["zeros"] in name:
            values[:] = 0
        if "nan" in spec and spec["nan"] in name:
            values.flat[0] = np.nan
    for old, new in spec.get("replace", []):
        content = {name.replace(old, new): values for name, values in content.items()}
    for name, shape in spec.get("extra", {}).items():
        content[name] = generator.standard_normal(shape)
    kept = {name: values for name, values in content.items() if spec.get("drop", "\0") not in name}
    return safetensors_file(kept, spec.get("dtype", "F32"))


def experts_of(name: str, module: ServedModule, spec: dict[str, Any]) -> list[str]:
    """The modules that tensors are written for one by one: those of experts where the case says so."""
    if not module.num_experts:
        return [name]
    return [of_expert(name, expert) for expert in range(module.num_experts)] if spec.get("experts") else []


def fused(
    parameters: list[str], model: Modules, rank: int, generator: np.random.Generator
) -> dict[str, np.ndarray[Any, Any]]:
    """What PEFT writes for stacked parameters of experts."""
    content: dict[str, np.ndarray[Any, Any]] = {}
    rows = EXPERTS * rank
    for layer in range(2):
        has = [part for part in ("gate_up_proj", "down_proj") if any(name.endswith(part) for name in parameters)]
        for part, level in zip(has, ("base_layer.", "")[2 - len(has) :], strict=True):
            sides = (HIDDEN, 2 * FFN) if part == "gate_up_proj" else (FFN, HIDDEN)
            prefix = f"base_model.model.model.layers.{layer}.mlp.experts.{level}lora_"
            content[prefix + "A.weight"] = generator.standard_normal((rows, sides[0]))
            content[prefix + "B.weight"] = generator.standard_normal((sides[1], rows))
    return content


def safetensors_file(content: dict[str, np.ndarray[Any, Any]], dtype: str) -> bytes:
    header, payload = {}, b""
    for name, values in content.items():
        raw = values.astype("<f2" if dtype == "F16" else "<f4").tobytes()
        if dtype == "BF16":
            raw = (np.frombuffer(raw, "<u4") >> 16).astype("<u2").tobytes()
        offsets = [len(payload), len(payload) + len(raw)]
        header[name] = {"dtype": dtype, "shape": list(values.shape), "data_offsets": offsets}
        payload += raw
    return with_header(json.dumps(header).encode(), payload)


@pytest.mark.parametrize(("config", "case"), list(cases()))
def test_a_configuration_is_treated_as_its_row_says(
    config: dict[str, Any], case: dict[str, Any], tmp_path: Path
) -> None:
    model = modules_of(case.get("model", "llama"))
    files = {CONFIG_FILE: tmp_path / CONFIG_FILE, WEIGHTS_FILE: tmp_path / WEIGHTS_FILE}
    files[CONFIG_FILE].write_text(json.dumps(config), "utf-8")
    files[WEIGHTS_FILE].write_bytes(weights(config, model, case.get("tensors", {})))
    own, num_bytes = tmp_path / "base", 4 * VOCAB * HIDDEN
    own.write_bytes(bytes(2 * num_bytes))
    _, _, embedding = _MODELS[case.get("model", "llama")]
    tensors = {
        f"{name}.weight": CheckpointTensor(own, "F32", (VOCAB, HIDDEN), place * num_bytes)
        for place, name in enumerate((embedding, "lm_head"))
    }
    base = dataclasses.replace(base_model(), linear_shapes={}, tensors=tensors, vocab_size=VOCAB)
    if "refused" in case:
        with pytest.raises(InvalidAdapter) as refusal:
            pack(files, base, reported=model)
        found = [(violation.field, violation.description) for violation in refusal.value.violations]
        expected = case["refused"]
        assert sorted(field for field, _ in found) == sorted(field for field, _ in expected), found
        for field, words in expected:
            assert any(field == name and words in description for name, description in found), found
        return
    info, _ = pack(files, base, reported=model)
    modules = [module for chunk in json.loads(info.manifest)["chunks"] for module in chunk["modules"]]
    accepted = case["accepted"]
    assert len(modules) == accepted["modules"]
    assert sorted({module["rank"] for module in modules}) == accepted["ranks"]
    assert sorted({module["scaling"] for module in modules}) == pytest.approx(accepted["scalings"])


def test_the_corpus_has_every_tool_and_version() -> None:
    names = [case.id for case in cases()]
    assert len(names) == len(set(names)) >= 200
    tools = {str(name).partition(":")[0] for name in names}
    assert tools == {"Axolotl", "LLaMA-Factory", "NeMo", "PEFT", "TRL", "Unsloth", "ms-swift", "others", "torchtune"}
    assert set(VERSIONS) == {f"0.{minor}" for minor in range(2, 22)}
