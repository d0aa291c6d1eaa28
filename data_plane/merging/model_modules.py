"""Merges packed adapters into the float32 weights of a transformers model, module by module; used by verify.py."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import torch

from contract.expert_names import DOWN, UP
from data_plane.adapters.format.packed import ModuleTensors
from data_plane.merging.weights import (
    BIASES,
    PARTS,
    CannotMerge,
    ReplacedRows,
    merge_matrix,
    merged_bias,
    with_row_biases,
    with_rows,
)

_EXPERTS = ".experts."


def untie(model: Any, names: Collection[str]) -> None:
    """Give each module that the adapter changes a weight of its own: an adapter on one does not change the other."""
    for name in names:
        if _EXPERTS not in name:
            module = _with_weight(model, name)
            module.weight = torch.nn.Parameter(module.weight.detach().clone(), requires_grad=False)


def merge_module(model: Any, part: ModuleTensors) -> None:
    """Put one module of an adapter into its weight. Raises CannotMerge."""
    name, scaling = part.module.name, part.module.scaling
    tensors = {key: tensor.float() for key, tensor in part.tensors.items()}
    if unknown := sorted(tensors.keys() - PARTS):
        raise CannotMerge(f"{name} has {', '.join(unknown)}, which cannot be verified yet")
    path, _, rest = name.rpartition(_EXPERTS)
    if path:
        module, weight = None, _expert_weight(model, f"{path}{_EXPERTS}".rstrip("."), rest)
    else:
        module = _with_weight(model, name)
        # [out, in] of a linear, a head and a router; an embedding and GPT-2's Conv1D lie the other way round.
        is_transposed = part.module.is_embedding or type(module).__name__ == "Conv1D"
        weight = module.weight.T if is_transposed else module.weight
    merge_matrix(weight, tensors, scaling)
    if tensors.keys() & BIASES:
        _merge_bias(module, name, tensors, scaling)


def replace_rows(module: Any, parts: Sequence[ReplacedRows], num_tokens: int | None) -> None:
    """Put an adapter's rows into an embedding or a head, which grows if the adapter has more tokens."""
    weight, bias = module.weight, getattr(module, "bias", None)
    size = max(len(weight), num_tokens or 0)
    module.weight = torch.nn.Parameter(with_rows(weight, parts, size), requires_grad=False)
    if bias is not None or any(part.bias is not None for part in parts):
        own = weight.new_zeros(size) if bias is None else bias
        module.bias = torch.nn.Parameter(with_row_biases(own, parts, size), requires_grad=False)


def _merge_bias(module: Any, name: str, tensors: dict[str, torch.Tensor], scaling: float) -> None:
    own = getattr(module, "bias", None)
    if not isinstance(module, torch.nn.Linear) and own is None:
        raise CannotMerge(f"{name} has a bias, and the model adds none there: it cannot be verified yet")
    module.bias = torch.nn.Parameter(merged_bias(own, tensors, scaling), requires_grad=False)


def _with_weight(model: Any, name: str) -> Any:
    """The module of this name. Raises CannotMerge unless it has a matrix."""
    try:
        module = model.get_submodule(name)
        is_matrix = module.weight.dim() == 2
    except AttributeError:
        is_matrix = False
    if not is_matrix:
        raise CannotMerge(f"{name} is not a module with a matrix and cannot be verified yet")
    return module


def _expert_weight(model: Any, path: str, rest: str) -> torch.Tensor:
    """A view [out, in] of one expert's weight. `rest` is the expert's number and the projection."""
    number, _, projection = rest.partition(".")
    experts: Any = model.get_submodule(path)
    stacked = getattr(experts, "down_proj" if projection == DOWN else "gate_up_proj", None)
    if stacked is None or stacked.dim() != 3 or not number.isdecimal():
        raise CannotMerge(f"{path} does not stack its experts' weights: they cannot be verified yet")
    weight: torch.Tensor = stacked.data[int(number)]
    if experts.is_transposed:
        weight = weight.T
    if projection == DOWN:
        return weight
    which, half = int(projection == UP), len(weight) // 2
    return weight[which * half : (which + 1) * half] if experts.is_concatenated else weight[which::2]
