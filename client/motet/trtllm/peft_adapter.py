"""A PEFT adapter's directory as a conversion reads it: plain LoRA and DoRA on linears of decoder layers, and plain LoRA
on the linears of all experts of a layer.

The files are the user's own. The server checks adapters, and this module reads no more than it needs.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from motet.adapters.files import CONFIG_FILE, WEIGHTS_FILE
from motet.errors import invalid_field
from motet.lora_module_ids import MODULES, expert_of, id_of
from motet.trtllm.base_weights import split
from motet.trtllm.tensors import TensorFile

_KEY = re.compile(
    r"base_model\.model\.(?P<module>.+)\.(?P<part>lora_A\.weight|lora_B\.weight|lora_magnitude_vector(?:\.weight)?)\Z"
)
_NOT_IN_ROWS = ("alora_invocation_tokens", "rope_scaling", "rope_parameters", "context_length")
_PARTS = {"lora_A.weight": "a", "lora_B.weight": "b"}


@dataclass(frozen=True)
class PeftModule:
    """One linear that the adapter changes."""

    name: str
    path: str  # after the layer's index
    keys: Mapping[str, str]  # tensors in the file by part: "a", "b" and, of DoRA, "magnitude"
    scaling: float


@dataclass(frozen=True)
class PeftRow:
    """What one row of the arrays holds."""

    layer: int
    module_id: int
    modules: tuple[PeftModule, ...]  # one; of experts, all of the layer in their order


@dataclass(frozen=True)
class PeftAdapter:
    """The adapter, and the open file of its tensors."""

    file: TensorFile
    config: bytes  # adapter_config.json as it is
    rows: tuple[PeftRow, ...]  # by layer, then by id

    @property
    def modules(self) -> list[PeftModule]:
        return [module for row in self.rows for module in row.modules]

    @property
    def is_dora(self) -> bool:
        return any("magnitude" in module.keys for module in self.modules)


def read_peft(directory: Path, *, is_gated: bool, num_experts: int | None) -> PeftAdapter:
    """Raises InvalidArgument for what is not such an adapter, with the first tensors that have no place in rows.

    num_experts: of each layer of the base model; None: it is not known.
    """
    try:
        raw = (directory / CONFIG_FILE).read_bytes()
        config: dict[str, Any] = json.loads(raw)
        is_lora = config.get("peft_type") == "LORA"
    except (OSError, ValueError, AttributeError) as error:
        raise invalid_field("directory", f"{directory / CONFIG_FILE} cannot be read: {error}") from error
    if not is_lora:
        raise invalid_field("directory", f"is of the kind {config.get('peft_type')!r}; only LORA can be converted")
    for name in _NOT_IN_ROWS:
        if config.get(name):
            raise invalid_field("directory", f"{CONFIG_FILE} has {name}, which TensorRT-LLM's rows cannot say")
    file = TensorFile(directory / WEIGHTS_FILE)
    # By module: layer, id, expert (0 of a linear that is alone) and path.
    places: dict[str, tuple[int, int, int, str]] = {}
    found: dict[str, dict[str, str]] = {}
    others = []
    for key in file.names:
        match = _KEY.match(key)
        place = None if match is None else _place(match["module"], is_gated=is_gated)
        if match is None or place is None:
            others.append(key)
        else:
            places[match["module"]] = place
            found.setdefault(match["module"], {})[_PARTS.get(match["part"], "magnitude")] = key
    if others:
        raise invalid_field(
            "directory",
            f"{len(others)} tensors have no place in TensorRT-LLM's rows, which hold A, B and DoRA's magnitudes of "
            f"linears in decoder layers, and A and B of experts that are named one by one: {', '.join(others[:3])}"
            f"{', ...' if others[3:] else ''}",
        )
    if not found:
        raise invalid_field("directory", f"{WEIGHTS_FILE} has no tensors")
    modules: dict[tuple[int, int], dict[int, PeftModule]] = {}
    for name, keys in found.items():
        layer, module_id, expert, path = places[name]
        if not {"a", "b"} <= keys.keys():
            raise invalid_field("directory", f"{name} has no lora_A or no lora_B")
        rank = file.read(keys["a"]).values.shape[0]
        module = PeftModule(name, path, keys, scaling_of(config, name, rank))
        modules.setdefault((layer, module_id), {})[expert] = module
    rows = [
        PeftRow(layer, module_id, tuple(by_expert[expert] for expert in sorted(by_expert)))
        for (layer, module_id), by_expert in sorted(modules.items())
    ]
    for row in rows:
        if expert_of(row.modules[0].path) is not None:
            _check_experts(row, file, num_experts, present=modules[row.layer, row.module_id].keys())
    return PeftAdapter(file, raw, tuple(rows))


def _place(module: str, *, is_gated: bool) -> tuple[int, int, int, str] | None:
    """Layer, id, expert and path of a module; None if rows have no place for it."""
    place = split(module)
    if place is None:
        return None
    layer, path = place
    if (expert := expert_of(path)) is not None:
        return layer, *expert, path
    module_id = id_of(path, is_gated=is_gated)
    return None if module_id is None else (layer, module_id, 0, path)


def _check_experts(row: PeftRow, file: TensorFile, num_experts: int | None, *, present: Collection[int]) -> None:
    """Raise InvalidArgument unless a row can hold these experts."""
    what = f"layer {row.layer}, {MODULES[row.module_id]}"
    if num_experts is None:
        raise invalid_field(
            "--base-model", f"is missing; a row holds all experts of a layer ({what}): give the checkpoint"
        )
    if sorted(present) != list(range(num_experts)):
        raise invalid_field(
            "directory",
            f"{what} has LoRA on {len(present)} experts, and a row holds all {num_experts} of the base model; register "
            "PEFT's files instead",
        )
    if any("magnitude" in module.keys for module in row.modules):
        raise invalid_field("directory", f"{what} has DoRA, which rows cannot say of experts; register PEFT's files")
    ranks = {file.read(module.keys["a"]).values.shape[0] for module in row.modules}
    if len(ranks) > 1:
        raise invalid_field("directory", f"{what} has experts of the ranks {sorted(ranks)}, and a row has one rank")


def scaling_of(config: Mapping[str, Any], module: str, rank: int) -> float:
    """A module's scaling by the fields of adapter_config.json, as PEFT computes it. Raises InvalidArgument."""
    try:
        weight = f"{module}.weight"  # what PEFT calls a router, whose weight it takes as a parameter
        if any(weight == name or weight.endswith(f".{name}") for name in config.get("target_parameters") or ()):
            module = weight
        alpha = float(config.get("lora_alpha", 8))
        for pattern, value in (config.get("alpha_pattern") or {}).items():
            # As peft.utils.get_pattern_key: the keys are expressions, of the user's own file.
            if re.match(rf"(.*\.)?({pattern})$", module):
                alpha = float(value)
                break
    except (TypeError, ValueError, AttributeError, re.error) as error:
        raise invalid_field("directory", f"{CONFIG_FILE}: alpha cannot be read: {error}") from error
    scaling = alpha / math.sqrt(rank) if config.get("use_rslora") else alpha / rank
    if not math.isfinite(scaling) or scaling == 0:
        raise invalid_field(
            "directory",
            f"{CONFIG_FILE} gives {module} a scaling of {scaling:g}, by which rows cannot be divided again; register "
            "PEFT's files instead",
        )
    return scaling
