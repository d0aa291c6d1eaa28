"""Adapters that name experts one by one, as PEFT wrote them with transformers 4, and the model with such an adapter
merged: transformers 5 has no module of one expert, so that PEFT cannot load all of them there."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from tests.makers import make_adapter

_PREFIX = "base_model.model."
_PARTS = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}


def write_one_by_one(
    directory: Path,
    checkpoint: Path,
    *,
    rank: int = 4,
    alpha: float = 8,
    parts: Sequence[str] = tuple(_PARTS),
    linears: Sequence[str] = (),
    experts: Sequence[int] | None = None,
    seed: int = 0,
    **config: Any,
) -> Path:
    """An adapter on experts (None: all) and on some linears, under the names of the model's own time."""
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    is_mixtral = model.config.model_type == "mixtral"
    generator, content = torch.Generator().manual_seed(seed), {}
    for name, module in model.named_modules():
        names: dict[str, torch.Tensor] = {}
        if name.endswith(".experts"):
            stacked: Any = module
            chosen = range(len(stacked.gate_up_proj)) if experts is None else experts
            names = {f"{name}.{e}.{part}": _weight(stacked, e, part) for e in chosen for part in parts}
        elif name.rpartition(".")[2] in (*linears, *(parts if experts is None else ())):
            weight: Any = module.weight
            names = {name: weight}
        for path, matrix in names.items():
            key = _old(path) if is_mixtral else path
            out, width = matrix.shape
            content[f"{_PREFIX}{key}.lora_A.weight"] = torch.randn(rank, width, generator=generator) / width**0.5
            content[f"{_PREFIX}{key}.lora_B.weight"] = torch.randn(out, rank, generator=generator) * 0.3
            if config.get("use_dora"):
                scale = torch.rand(out, generator=generator) + 0.5
                content[f"{_PREFIX}{key}.lora_magnitude_vector"] = matrix.detach().norm(dim=1) * scale
    directory.mkdir()
    save_file(content, directory / "adapter_model.safetensors")
    named = [_PARTS[part] for part in parts] if is_mixtral else list(parts)
    if experts is not None:
        config.setdefault("target_modules", rf".*experts\.({'|'.join(map(str, experts))})\..*|.*({'|'.join(linears)})")
    fields = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": rank, "lora_alpha": alpha, "bias": "none"}
    fields |= {"target_modules": [*named, *linears]} | config
    (directory / "adapter_config.json").write_text(json.dumps(fields), encoding="utf-8")
    return directory


def merged(directory: Path, checkpoint: Path, adapter: Path) -> Path:
    """A checkpoint whose weights are those of the base with the adapter of `write_one_by_one` added."""
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    config = json.loads((adapter / "adapter_config.json").read_text(encoding="utf-8"))
    scaling = config["lora_alpha"] / config["r"] ** (0.5 if config.get("use_rslora") else 1)
    content = load_file(adapter / "adapter_model.safetensors")
    with torch.no_grad():
        for key, a in content.items():
            if not key.endswith(".lora_A.weight"):
                continue
            path = key.removeprefix(_PREFIX).removesuffix(".lora_A.weight")
            b, magnitude = content[key.replace("lora_A", "lora_B")], content.get(_magnitude(key))
            before, _, last = _new(path).rpartition(".")
            if ".experts." in path:
                experts, _, expert = before.rpartition(".")
                weight = _weight(model.get_submodule(experts), int(expert), last)
            else:
                linear: Any = model.get_submodule(f"{before}.{last}")
                weight = linear.weight
            weight.add_(scaling * b @ a)
            if magnitude is not None:
                weight.mul_((magnitude / weight.norm(dim=1))[:, None])
    model.save_pretrained(directory)
    return directory


def adapter_and_truth(directory: Path, checkpoint: Path, *, is_fused: bool) -> tuple[Path, tuple[Path, Path | None]]:
    """An adapter on all experts and q_proj, and a checkpoint (with an adapter) from which PEFT computes the truth."""
    if is_fused:
        parameters = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
        path = make_adapter(directory / "adapter", checkpoint, rank=3, targets=["q_proj"], target_parameters=parameters)
        return path, (checkpoint, path)
    path = write_one_by_one(directory / "adapter", checkpoint, linears=["q_proj"])
    return path, (merged(directory / "truth", checkpoint, path), None)


def _magnitude(key: str) -> str:
    return key.replace("lora_A.weight", "lora_magnitude_vector")


def _weight(experts: Any, expert: int, part: str) -> torch.Tensor:
    """A view [out, in] of one expert's weight."""
    if part == "down_proj":
        matrix = experts.down_proj.data[expert]
        return matrix.T if experts.is_transposed else matrix
    matrix = experts.gate_up_proj.data[expert]
    matrix = matrix.T if experts.is_transposed else matrix
    if part == "gate_up_proj":
        return matrix
    which, half = int(part == "up_proj"), len(matrix) // 2
    return matrix[which * half : (which + 1) * half] if experts.is_concatenated else matrix[which::2]


def _old(path: str) -> str:
    """Mixtral's name of transformers 4."""
    before, _, last = path.replace(".mlp.", ".block_sparse_moe.").rpartition(".")
    return f"{before}.{_PARTS.get(last, last)}"


def _new(path: str) -> str:
    before, _, last = path.replace(".block_sparse_moe.", ".mlp.").rpartition(".")
    return f"{before}.{ {old: new for new, old in _PARTS.items()}.get(last, last) }"
