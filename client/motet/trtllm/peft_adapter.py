"""A PEFT adapter's directory as a conversion reads it: plain LoRA and DoRA on linears of decoder layers.

The files are the user's own. The server checks adapters, and this module reads no more than it needs.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from motet.adapters.files import CONFIG_FILE, WEIGHTS_FILE
from motet.errors import invalid_field
from motet.lora_module_ids import id_of
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
    layer: int
    path: str  # behind the layer's index
    keys: Mapping[str, str]  # tensors in the file by part: "a", "b" and, of DoRA, "magnitude"
    scaling: float


@dataclass(frozen=True)
class PeftAdapter:
    """The adapter, and the open file of its tensors."""

    file: TensorFile
    config: bytes  # adapter_config.json as it is
    modules: tuple[PeftModule, ...]  # by layer, then by id

    @property
    def is_dora(self) -> bool:
        return any("magnitude" in module.keys for module in self.modules)


def read_peft(directory: Path, *, is_gated: bool) -> PeftAdapter:
    """Raises InvalidArgument for what is not such an adapter, with the first tensors that have no place in rows."""
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
    found: dict[str, dict[str, str]] = {}
    others = []
    for key in file.names:
        match = _KEY.match(key)
        place = None if match is None else split(match["module"])
        if match is None or place is None or id_of(place[1], is_gated=is_gated) is None:
            others.append(key)
        else:
            found.setdefault(match["module"], {})[_PARTS.get(match["part"], "magnitude")] = key
    if others:
        raise invalid_field(
            "directory",
            f"{len(others)} tensors have no place in TensorRT-LLM's rows, which hold A, B and DoRA's magnitudes of "
            f"linears in decoder layers: {', '.join(others[:3])}{', ...' if others[3:] else ''}",
        )
    if not found:
        raise invalid_field("directory", f"{WEIGHTS_FILE} has no tensors")
    modules = []
    for name, keys in found.items():
        place = split(name)
        if place is None or not {"a", "b"} <= keys.keys():
            raise invalid_field("directory", f"{name} has no lora_A or no lora_B")
        rank = file.read(keys["a"]).values.shape[0]
        modules.append(PeftModule(name, *place, keys, scaling_of(config, name, rank)))
    modules.sort(key=lambda module: (module.layer, id_of(module.path, is_gated=is_gated) or 0))
    return PeftAdapter(file, raw, tuple(modules))


def scaling_of(config: Mapping[str, Any], module: str, rank: int) -> float:
    """A module's scaling by the fields of adapter_config.json, as PEFT computes it. Raises InvalidArgument."""
    try:
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
        raise invalid_field("directory", f"{CONFIG_FILE} gives {module} a scaling of {scaling:g}")
    return scaling
