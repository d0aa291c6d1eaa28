"""Registration goes by what workers tell of the modules, and by the checkpoint's headers before."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from control_plane.errors import InvalidAdapter
from control_plane.registry.model.served_modules import ModuleKind, Modules, ServedModule
from control_plane.registry.peft.ingest import PackedInfo
from control_plane.registry.peft.target_modules import TargetModules, layer_of
from tests.control_plane.registry.rig import CONFIG, SHAPES, base_model, pack, safetensors_bytes, tensors, write_adapter

REPORTED: dict[str, ServedModule] = {
    name: ServedModule(ModuleKind.LINEAR, in_features, out_features)
    for name, (out_features, in_features) in SHAPES.items()
}
NOTHING: Modules = {}


def renamed(old: str, new: str) -> dict[str, np.ndarray[Any, Any]]:
    return {name.replace(old, new): values for name, values in tensors().items()}


def register(directory: Path, content: dict[str, np.ndarray[Any, Any]], reported: Modules, **config: Any) -> PackedInfo:
    files = write_adapter(directory, weights=safetensors_bytes(content), **config)
    return pack(files, reported=reported)[0]


def test_the_same_adapter_has_one_digest_whoever_reported_the_modules(tmp_path: Path) -> None:
    assert register(tmp_path / "a", tensors(), NOTHING).digest == register(tmp_path / "b", tensors(), REPORTED).digest


def test_modules_of_any_path_are_taken_once_a_worker_reported_them(tmp_path: Path) -> None:
    """The tree's paths follow from no rule: transformer.blocks, decoder.layers, ..."""
    reported = {name.replace("model.layers", "transformer.blocks"): module for name, module in REPORTED.items()}
    content = renamed("model.layers", "transformer.blocks")
    with pytest.raises(InvalidAdapter, match=r"whether as transformer\.blocks\.0\.self_attn\.q_proj only a worker can"):
        register(tmp_path / "a", content, NOTHING)
    info = register(tmp_path / "b", content, reported)
    assert info.target_modules == tuple(sorted(reported))
    assert [len(info.chunks), info.max_rank] == [2, 4]


def test_a_module_that_takes_no_adapters_is_refused_with_the_workers_reason(tmp_path: Path) -> None:
    reported = dict(REPORTED)
    name = "model.layers.1.self_attn.v_proj"
    reported[name] = ServedModule(ModuleKind.LINEAR, 16, 8, "it sees only some of the tokens")
    with pytest.raises(InvalidAdapter) as refusal:
        register(tmp_path, tensors(), reported)
    (violation,) = refusal.value.violations
    assert violation.field.startswith(f"base_model.model.{name}.lora_")
    assert violation.description == (
        f"{name} takes no adapters: it sees only some of the tokens; leave it out of target_modules"
        " (and 1 more like it)"  # A and B
    )


def test_a_module_that_the_model_does_not_have_is_refused_by_name(tmp_path: Path) -> None:
    reported = {name: module for name, module in REPORTED.items() if ".1." not in name}
    with pytest.raises(InvalidAdapter, match=r"the base model has no module model\.layers\.1\.self_attn\.q_proj"):
        register(tmp_path, tensors(), reported)


def test_without_any_known_layer_registration_waits_for_a_worker(tmp_path: Path) -> None:
    from dataclasses import replace

    files = write_adapter(tmp_path)
    unknown = replace(base_model(), linear_shapes={})
    with pytest.raises(InvalidAdapter, match="only a worker can tell: start one, then register the adapter again"):
        pack(files, unknown)
    assert pack(files, unknown, reported=REPORTED)[0].target_modules == tuple(sorted(REPORTED))


def test_lora_on_stacked_parameters_is_distinguished_from_a_head_that_is_not_known(tmp_path: Path) -> None:
    base = "base_model.model."
    stacked = tensors() | {
        f"{base}model.layers.0.mlp.stack.base_layer.lora_A.weight": np.ones((8, 4), "<f4"),
        f"{base}model.layers.0.mlp.stack.lora_A.weight": np.ones((8, 4), "<f4"),
    }
    with pytest.raises(InvalidAdapter, match="belongs to LoRA on a parameter of a linear, which is not served"):
        register(tmp_path / "a", stacked, NOTHING)
    head = tensors() | {f"{base}output.base_layer.weight": np.ones((256, 16), "<f4")}
    with pytest.raises(InvalidAdapter) as refusal:
        register(tmp_path / "b", head, REPORTED)
    assert "stacked" not in str(refusal.value) and "no module output" in str(refusal.value)


def test_a_linear_outside_of_the_layers_counts_with_both_of_its_widths(tmp_path: Path) -> None:
    """As OPT's project_in: the arena's pages fit it on both sides."""
    name = "model.decoder.project_in"
    reported = {name: ServedModule(ModuleKind.LINEAR, 6, 16)}
    content = {
        f"base_model.model.{name}.lora_A.weight": np.ones((4, 6), "<f4"),
        f"base_model.model.{name}.lora_B.weight": np.ones((16, 4), "<f4"),
    }
    info = register(tmp_path, content, reported, target_modules=["project_in"])
    assert info.arena_bytes == 8 * (6 + 16) * 4
    assert b'"name":"rest"' in info.manifest


def test_a_head_whose_own_weight_is_not_found_must_come_without_it(tmp_path: Path) -> None:
    """PEFT would put a saved weight in the base's place; whether it is the base's cannot be seen here."""
    reported = REPORTED | {"output": ServedModule(ModuleKind.HEAD, 16, 256)}
    content = {
        "base_model.model.output.lora_A.weight": np.ones((4, 16), "<f4"),
        "base_model.model.output.lora_B.weight": np.ones((256, 4), "<f4"),
    }
    assert register(tmp_path / "a", content, reported, target_modules=["output"]).target_modules == ("output",)
    saved = content | {"base_model.model.output.base_layer.weight": np.ones((256, 16), "<f4")}
    with pytest.raises(InvalidAdapter, match="save with save_embedding_layers=False"):
        register(tmp_path / "b", saved, reported, target_modules=["output"])


@pytest.mark.parametrize(
    ("name", "layer"), [("model.layers.7.mlp.experts.3.up_proj", 7), ("transformer.h.0.attn", 0), ("lm_head", None)]
)
def test_the_first_number_of_a_path_is_the_layer(name: str, layer: int | None) -> None:
    assert layer_of(name) == layer


def test_before_a_worker_reported_them_the_headers_name_the_modules() -> None:
    targets = TargetModules.of(base_model(), NOTHING)
    assert targets.served == REPORTED
    assert CONFIG["target_modules"] == ["q_proj", "v_proj"]
