"""Biases of the base model in an adapter's file: the base's own are dropped, trained ones packed, others refused."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from control_plane.errors import InvalidAdapter
from control_plane.registry.model.base_model import BaseModel
from control_plane.registry.model.embedding_modules import CheckpointTensor
from tests.control_plane.registry.rig import (
    MODULES,
    SHAPES,
    base_model,
    pack,
    safetensors_bytes,
    tensors,
    write_adapter,
)

Tensors = dict[str, np.ndarray[Any, Any]]
Q, V = MODULES[:2]  # both have a bias, the norm beside them too
PREFIX = "base_model.model."
NORM = "model.layers.0.input_layernorm"
OWN = {name: np.linspace(-1, 1, size).astype("<f4") for name, size in ((Q, 16), (V, 8), (NORM, 16))}


def with_biases(directory: Path) -> BaseModel:
    """A base model whose checkpoint has weights and biases of OWN."""
    found = {}
    for index, (name, values) in enumerate(OWN.items()):
        path = directory / str(index)
        path.write_bytes(values.tobytes())
        found[f"{name}.bias"] = CheckpointTensor(path, "F32", values.shape, 0)
        found[f"{name}.weight"] = CheckpointTensor(path, "F32", SHAPES.get(name, (16,)), 0)
    name = MODULES[2]  # a linear without a bias
    found[f"{name}.weight"] = CheckpointTensor(path, "F32", SHAPES[name], 0)
    return dataclasses.replace(base_model(), tensors=found)


def described(tmp_path: Path, extra: Tensors, **fields: Any) -> dict[str, dict[str, Any]]:
    """The manifest's modules by name."""
    raw = safetensors_bytes(tensors(modules=[Q]) | extra)
    files = write_adapter(tmp_path / "adapter", weights=raw, target_modules=[Q], **({"bias": "all"} | fields))
    info, _ = pack(files, with_biases(tmp_path))
    modules = [module for chunk in json.loads(info.manifest)["chunks"] for module in chunk["modules"]]
    return {module["name"]: module for module in modules}


def refused(tmp_path: Path, extra: Tensors, **fields: Any) -> tuple[str, str]:
    with pytest.raises(InvalidAdapter) as refusal:
        described(tmp_path, extra, **fields)
    (violation,) = refusal.value.violations
    return violation.field, violation.description


def test_a_trained_bias_is_packed_beside_the_adapter(tmp_path: Path) -> None:
    trained = {f"{PREFIX}{Q}.base_layer.bias": OWN[Q] + 1}
    for bias in ("all", "lora_only"):
        modules = described(tmp_path, trained, bias=bias)
        assert modules.keys() == {Q}
        assert modules[Q]["parts"] == ["a", "b", "base_bias"]


def test_a_bias_of_a_module_without_an_adapter_is_a_module_of_its_own(tmp_path: Path) -> None:
    modules = described(tmp_path, {f"{PREFIX}{V}.bias": OWN[V] + 1})
    assert modules.keys() == {Q, V}
    assert modules[V]["parts"] == ["base_bias"]
    assert (modules[V]["rank"], modules[V]["scaling"]) == (1, 1.0)


@pytest.mark.parametrize("bias", ["none", "all"])
def test_a_bias_that_is_the_bases_own_changes_nothing(tmp_path: Path, bias: str) -> None:
    plain = described(tmp_path, {}, bias="none")
    own = {f"{PREFIX}{name}.bias": OWN[name] for name in (V, NORM)} | {f"{PREFIX}{Q}.base_layer.bias": OWN[Q]}
    assert described(tmp_path, own, bias=bias) == plain


REFUSED: list[tuple[str, Tensors, dict[str, Any], str]] = [
    ("a norm", {f"{PREFIX}{NORM}.bias": OWN[NORM] + 1}, {}, "of a module that takes no adapters, such as a norm"),
    ("an unknown module", {f"{PREFIX}model.other.bias": OWN[Q]}, {}, "of a module that takes no adapters"),
    ("not said", {f"{PREFIX}{V}.bias": OWN[V] + 1}, {"bias": "none"}, 'and bias is "none"; set bias to "all"'),
    ("not said, beside", {f"{PREFIX}{Q}.base_layer.bias": OWN[Q] + 1}, {"bias": None}, 'and bias is "none"'),
    ("its old name", {f"{PREFIX}{Q}.bias": OWN[Q] + 1}, {}, f"rename it to {PREFIX}{Q}.base_layer.bias"),
    ("a size", {f"{PREFIX}{V}.bias": OWN[Q]}, {}, "shape [16], expected [8]"),
    ("a size beside", {f"{PREFIX}{Q}.base_layer.bias": OWN[V]}, {}, "shape [8], expected [16]"),
    ("none in the base", {f"{PREFIX}{MODULES[2]}.bias": OWN[Q]}, {}, "the base model has no such bias"),
]


@pytest.mark.parametrize(("extra", "fields", "words"), [row[1:] for row in REFUSED], ids=[row[0] for row in REFUSED])
def test_other_biases_are_refused(tmp_path: Path, extra: Tensors, fields: dict[str, Any], words: str) -> None:
    field, description = refused(tmp_path, extra, **fields)
    assert field.removeprefix(PREFIX) in {name.removeprefix(PREFIX) for name in extra}
    assert words in description
