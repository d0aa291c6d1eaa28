"""Reads the names that adapters have for experts and routers, by all versions of transformers and PEFT."""

from __future__ import annotations

import re
from dataclasses import dataclass

from contract.expert_names import DOWN, GATE, UP

# Mixtral's names before transformers 5.
_OLD_BLOCK, _BLOCK = ".block_sparse_moe.", ".mlp."
_OLD_PARTS = {"w1": GATE, "w2": DOWN, "w3": UP}
# experts.3.gate_proj; experts.gate_up_projs.3 has linears in the place of the stacked parameters.
_ONE = re.compile(
    r"(?P<experts>.+\.experts)\.(?P<expert>\d{1,6})\.(?P<part>gate_proj|up_proj|down_proj|gate_up_proj|w[123])"
)
_ONE_OF_LIST = re.compile(r"(?P<experts>.+\.experts)\.(?P<part>gate_up|down)_projs\.(?P<expert>\d{1,6})")
_FUSED = re.compile(r"(?P<experts>.+\.experts)(?:\.(?P<level>base_layer))?")


@dataclass(frozen=True, slots=True)
class ExpertPath:
    """What the name of an expert's tensor says."""

    experts: str  # path of the layer's experts in the base model
    suffix: str  # of the tensor: ".lora_A.weight" and the like
    named: str  # the module's name in the file, which the configuration has too
    expert: int | None = None  # None: all, fused
    part: str = ""  # of one expert: gate_proj, up_proj, down_proj or gate_up_proj
    level: str = ""  # of fused tensors: "base_layer" if PEFT's wrapper is the inner one of two


@dataclass(frozen=True, slots=True)
class RouterPath:
    """What the name of a tensor says that may be a router's."""

    module: str  # in the base model
    named: str
    suffix: str


def expert_path(key: str, prefix: str) -> ExpertPath | None:
    """What the name of a tensor says about experts; None for all other tensors."""
    module, lora, rest = key.removeprefix(prefix).rpartition(".lora_")
    if not key.startswith(prefix) or not lora or ".experts" not in module:
        return None
    suffix, path = f"{lora}{rest}", module.replace(_OLD_BLOCK, _BLOCK)
    if one := _ONE.fullmatch(path) or _ONE_OF_LIST.fullmatch(path):
        part = one["part"] if path.endswith(one["part"]) else f"{one['part']}_proj"
        return ExpertPath(one["experts"], suffix, module, int(one["expert"]), _OLD_PARTS.get(part, part))
    if fused := _FUSED.fullmatch(path):
        return ExpertPath(fused["experts"], suffix, module, level=fused["level"] or "")
    return None


def router_path(key: str, prefix: str) -> RouterPath | None:
    """What the name of a tensor says if it is a router's; None for a tensor that is not of LoRA."""
    module, lora, rest = key.removeprefix(prefix).rpartition(".lora_")
    if not key.startswith(prefix) or not lora:
        return None
    return RouterPath(module.replace(_OLD_BLOCK, _BLOCK), module, f"{lora}{rest}")
