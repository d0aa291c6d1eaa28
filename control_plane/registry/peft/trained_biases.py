"""Decides about the biases of the base model that an adapter's file holds: the base's own, trained, or not served.

Called by ingest.py. PEFT loads such a bias in the place of the base's. The packed layout has it beside the module's
adapter, and a worker adds the difference for the adapter's own tokens only.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import BinaryIO

from control_plane.registry.model.embedding_modules import CheckpointTensor, TensorsByModule
from control_plane.registry.model.served_modules import ModuleKind
from control_plane.registry.peft.adapter_config import AdapterConfig
from control_plane.registry.peft.base_weights import is_same_weight
from control_plane.registry.peft.kinds.base_bias import PART_BASE_BIAS
from control_plane.registry.peft.module_plans import ModulePlan
from control_plane.registry.peft.problems import Problems
from control_plane.registry.peft.safetensors_header import CHECK_BASE, TensorEntry, refuse, shorten
from control_plane.registry.peft.target_modules import TargetModules, layer_of

_BIAS_ONLY_RANK = 1  # of a module without an adapter: a worker adds zeros of this rank, and the bias


def with_trained_biases(
    file: BinaryIO,
    modules: list[ModulePlan],
    others: Mapping[str, TensorEntry],
    config: AdapterConfig,
    targets: TargetModules,
    problems: Problems,
) -> list[ModulePlan]:
    """The modules with the biases that were trained, ordered by name. Notes those that cannot be served.

    `others` are the biases of modules without an adapter, by module.
    """
    if not others and all(plan.base_bias is None for plan in modules):
        return modules
    own, result = TensorsByModule(targets.base_model.tensors, "bias"), []
    for plan in modules:
        result.append(plan)
        if plan.base_bias is None or _is_own(file, plan.base_bias, own.find(plan.name), targets):
            continue
        with problems.collected():
            _check_trained(plan.base_bias, plan.name, config, targets, own)
            result[-1] = replace(plan, tensors=(*plan.tensors, (PART_BASE_BIAS, plan.base_bias)))
    adapted = {plan.name for plan in modules}
    for name, entry in others.items():
        if _is_own(file, entry, own.find(name), targets):
            continue
        with problems.collected():
            if name in adapted:
                raise refuse(
                    shorten(entry.name),
                    f"is the bias of an adapted module as early versions of PEFT named it, and others do not load it; "
                    f"rename it to {entry.name.removesuffix('bias')}{PART_BASE_BIAS.name}",
                )
            _check_trained(entry, name, config, targets, own)
            result.append(_bias_only(name, entry, targets))
    return sorted(result, key=lambda plan: plan.name)


def _is_own(file: BinaryIO, entry: TensorEntry, own: CheckpointTensor | None, targets: TargetModules) -> bool:
    """Whether the bias is the base model's: it was saved and not trained."""
    return own is not None and is_same_weight(file, entry, own, targets.base_model.dtype)


def _check_trained(
    entry: TensorEntry, name: str, config: AdapterConfig, targets: TargetModules, own: TensorsByModule
) -> None:
    """Raise InvalidAdapter for a bias that is not the base's own and cannot be served."""
    module = targets.served.get(name)
    field = shorten(entry.name)
    if not config.trains_biases:
        raise refuse(
            field,
            'is not the base model\'s own, and bias is "none"; set bias to "all" if it was trained, else leave it out',
        )
    if module is None or module.kind is ModuleKind.EMBEDDING:
        raise refuse(
            field,
            "is a trained bias of a module that takes no adapters, such as a norm, and is not served; train with "
            'bias="lora_only" or "none"',
        )
    if entry.shape != (module.out_features,):
        raise refuse(field, f"shape {list(entry.shape)}, expected {[module.out_features]}; {CHECK_BASE}")
    if targets.has_weight(name) and own.find(name) is None:
        raise refuse(field, f"is in the file, but the base model has no such bias; {CHECK_BASE}")


def _bias_only(name: str, entry: TensorEntry, targets: TargetModules) -> ModulePlan:
    module = targets.served[name]
    return ModulePlan(
        name=name,
        tensors=((PART_BASE_BIAS, entry),),
        rank=_BIAS_ONLY_RANK,
        scaling=1.0,
        in_features=module.in_features,
        out_features=module.out_features,
        layer=None if targets.is_embedding_module(name) else layer_of(name),
        kind=module.kind,
        base_bias=entry,
    )
