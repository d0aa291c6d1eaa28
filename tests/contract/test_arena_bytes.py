"""What an adapter takes of an arena is the same for the control plane and for a worker."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from control_plane.registry.model.served_modules import ModuleKind, ServedModule
from data_plane.adapters.arena.pages import PagePool
from data_plane.adapters.arena.placement import place
from data_plane.adapters.format.manifest import read_manifest
from data_plane.plan import TargetKind, TargetModule
from tests.control_plane.registry.rig import CONFIG, base_model, pack, safetensors_bytes, write_adapter

HIDDEN, VOCAB_SIZE = 64, 250
# Kind, in_features and out_features of every sort of target module.
MODULES = {
    "model.layers.0.self_attn.q_proj": (TargetKind.LINEAR, HIDDEN, 96),
    "model.layers.0.self_attn.k_proj": (TargetKind.LINEAR, HIDDEN, 32),
    "model.layers.0.mlp.down_proj": (TargetKind.LINEAR, 160, HIDDEN),
    "model.layers.0.mlp.gate": (TargetKind.LINEAR, HIDDEN, 3),
    "model.layers.0.mlp.shared_expert_gate": (TargetKind.LINEAR, HIDDEN, 1),
    "model.project_in": (TargetKind.LINEAR, 48, HIDDEN),
    "lm_head": (TargetKind.HEAD, HIDDEN, VOCAB_SIZE),
    "model.embed_tokens": (TargetKind.EMBEDDING, VOCAB_SIZE, HIDDEN),
}
TARGETS = {name: TargetModule(name, *module) for name, module in MODULES.items()}


FORMS: dict[str, dict[str, Any]] = {
    "lora": {},
    "dora": {"use_dora": True},
    "biases": {"lora_bias": True, "bias": "lora_only"},
}


def weights(names: list[str], rank: int, form: str) -> bytes:
    content: dict[str, np.ndarray[Any, Any]] = {}
    for name in names:
        kind, in_features, out_features = MODULES[name]
        a, b = ("embedding_A", "embedding_B") if kind is TargetKind.EMBEDDING else ("A.weight", "B.weight")
        content[f"base_model.model.{name}.lora_{a}"] = np.ones((rank, in_features), "<f4")
        content[f"base_model.model.{name}.lora_{b}"] = np.ones((out_features, rank), "<f4")
        vectors = {"dora": ["lora_magnitude_vector"], "biases": ["lora_B.bias", "base_layer.bias"]}.get(form, [])
        for vector in vectors:
            content[f"base_model.model.{name}.{vector}"] = np.ones(out_features, "<f4")
    return safetensors_bytes(content)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("names", [*([name] for name in MODULES), list(MODULES)], ids=[*MODULES, "all"])
def test_both_sides_count_the_same_bytes(tmp_path: Path, names: list[str], form: str) -> None:
    if form == "biases":
        names = [name for name in names if MODULES[name][0] is TargetKind.LINEAR] or [next(iter(MODULES))]
    reported = {name: ServedModule(ModuleKind(kind.value), a, b) for name, (kind, a, b) in MODULES.items()}
    raw = weights(names, 9, form)
    files = write_adapter(tmp_path, CONFIG | {"r": 9, "target_modules": names} | FORMS[form], weights=raw)
    info, _ = pack(files, dataclasses.replace(base_model(), linear_shapes={}), reported=reported)
    manifest = read_manifest(info.manifest, info.digest)
    pool = PagePool(list(TARGETS.values()), 1 << 20, torch.float32, torch.device("cpu"))
    placement = place(manifest, TARGETS, pool)
    assert manifest.arena_bytes({"lm_head"}) == info.arena_bytes == placement.num_pages * pool.page_bytes


def test_a_narrow_output_does_not_narrow_the_pages_of_the_model() -> None:
    """One column made every page one column wide."""
    linears = [target for target in TARGETS.values() if target.kind is TargetKind.LINEAR]
    wide = [target for target in linears if target.out_features > 3]
    widths = [PagePool(some, 1 << 20, torch.float32, torch.device("cpu")).tile_width for some in (wide, linears)]
    assert widths == [16, 16]
