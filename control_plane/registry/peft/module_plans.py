"""Matches the tensors of an adapter's file with its configuration and the base model, module by module.

Called by ingest.py, before any value is read. Every name, shape and rank that does not fit is refused by name.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from contract.packed_layout import ModuleSize
from control_plane.registry.model.served_modules import ModuleKind
from control_plane.registry.peft.adapter_config import AdapterConfig, check_scaling
from control_plane.registry.peft.safetensors_header import CHECK_BASE, TensorEntry, refuse, shorten
from control_plane.registry.peft.target_modules import TargetModules, layer_of
from control_plane.registry.peft.tensor_names import split_key

_LINEAR = ("lora_A", "lora_B")
_EMBEDDING = ("lora_embedding_A", "lora_embedding_B")
# Last parts of the names of embeddings and heads, over all models.
_EMBEDDING_MODULE_NAMES = ("lm_head", "embed_out", "embed_tokens", "embed_in", "word_embeddings", "wte")


@dataclass(frozen=True, slots=True)
class ModulePlan:
    """One linear that the adapter changes, or the embedding, which leads from the vocabulary."""

    name: str
    a: TensorEntry
    b: TensorEntry
    rank: int
    scaling: float
    in_features: int
    out_features: int
    layer: int | None  # the decoder layer that holds it; None: outside of them
    kind: ModuleKind
    bias: TensorEntry | None  # LoRA bias
    magnitude: TensorEntry | None  # DoRA
    base_weight: TensorEntry | None  # PEFT saves the base's own weight beside adapters on embedding and head
    base_bias: TensorEntry | None  # and its bias, which some heads have

    @property
    def size(self) -> ModuleSize:
        """What the module's size in an arena depends on."""
        sides = {ModuleKind.EMBEDDING: [self.out_features], ModuleKind.HEAD: [self.in_features]}
        widths = sides.get(self.kind, [self.in_features, self.out_features])
        has_vector = self.bias is not None or self.magnitude is not None
        return ModuleSize(self.rank, self.in_features, self.out_features, widths, has_vector)

    @property
    def is_embedding(self) -> bool:
        return self.kind is ModuleKind.EMBEDDING


def plan_modules(config: AdapterConfig, entries: Mapping[str, TensorEntry], targets: TargetModules) -> list[ModulePlan]:
    """What the adapter changes, ordered by name."""
    served = targets.served
    found: dict[str, dict[str, TensorEntry]] = {}
    for entry in entries.values():
        module, part = split_key(entry.name, targets)
        parts = found.setdefault(module, {})
        if part in parts:
            raise refuse(shorten(entry.name), f"appears twice (also as {shorten(parts[part].name)}); remove one")
        parts[part] = entry
    if config.ties_weights and targets.are_tied and (adapted := sorted(filter(targets.is_embedding_module, found))):
        raise refuse(
            "ensure_weight_tying",
            f"is true, the base model ties embedding and head, and the adapter changes {adapted[0]}; tied adapters are "
            "not served: train without ensure_weight_tying, or leave embedding and head out",
        )
    targeted = {name for name in served if config.is_targeted(name, is_linear=not targets.is_embedding_module(name))}
    for name in sorted(found):
        _check_parts(name, found[name], config, is_embedding=targets.is_input_embedding(name))
        if name not in targeted:
            raise refuse("target_modules", f"does not name {name}, for which there are tensors; PEFT would drop them")
    embedding_modules = [name for name in served if targets.is_embedding_module(name)]
    named = [name for name in config.target_modules or () if name.rsplit(".", 1)[-1] in _EMBEDDING_MODULE_NAMES]
    for target in sorted(named):
        if not any(name == target or name.endswith("." + target) for name in embedding_modules):
            raise refuse("target_modules", f"names {target}; this base model has no such embedding or head")
    for name in sorted(targeted - found.keys()):
        part = (_EMBEDDING if targets.is_input_embedding(name) else _LINEAR)[0]
        raise refuse(f"{name}.{part}", "is missing, target_modules names the module; save the adapter again")
    return [_plan_module(name, found[name], config, targets) for name in sorted(found)]


def _check_parts(name: str, parts: Mapping[str, TensorEntry], config: AdapterConfig, *, is_embedding: bool) -> None:
    """Every tensor of a module that the configuration asks for, and no other."""
    sides, others = (_EMBEDDING, _LINEAR) if is_embedding else (_LINEAR, _EMBEDDING)
    for part in others:
        if part in parts:
            raise refuse(
                f"{name}.{part}",
                f"is there, of {'an embedding' if is_embedding else 'a linear'} "
                f"{sides[0]} and {sides[1]} are expected; {CHECK_BASE}",
            )
    if is_embedding and config.has_lora_bias:
        raise refuse("lora_bias", f"is true and target_modules names {name}; PEFT knows no LoRA bias on embeddings")
    for side in sides:
        if side not in parts:
            raise refuse(f"{name}.{side}", f"is missing, {min(parts)} is there; save the adapter again")
    for part, key, is_wanted in (
        ("lora_B.bias", "lora_bias", config.has_lora_bias),
        ("lora_magnitude_vector", "use_dora", config.is_dora),
    ):
        if is_wanted and part not in parts:
            raise refuse(f"{name}.{part}", f"is missing, {key} is true; save the adapter again")
        if part in parts and not is_wanted:
            raise refuse(f"{name}.{part}", f"is there, {key} is not true; PEFT would drop it: save the adapter again")


def _plan_module(
    name: str, parts: Mapping[str, TensorEntry], config: AdapterConfig, targets: TargetModules
) -> ModulePlan:
    module = targets.served[name]
    out_features, in_features = module.out_features, module.in_features
    rank = config.rank_of(name)
    is_embedding = targets.is_input_embedding(name)
    shapes: dict[str, tuple[int, ...]] = {
        **dict.fromkeys(("lora_A", "lora_embedding_A"), (rank, in_features)),
        **dict.fromkeys(("lora_B", "lora_embedding_B"), (out_features, rank)),
        **dict.fromkeys(("lora_B.bias", "lora_magnitude_vector", "base_layer.bias"), (out_features,)),
        "base_layer.weight": (in_features, out_features) if is_embedding else (out_features, in_features),
    }
    own = targets.own(name)
    if "base_layer.bias" in parts and (own is None or own.bias is None):
        raise refuse(f"{name}.base_layer.bias", f"is there, the base model has no such bias; {CHECK_BASE}")
    for part, entry in parts.items():
        if entry.shape != shapes[part]:
            raise refuse(
                f"{name}.{part}",
                f"shape {list(entry.shape)}, expected {list(shapes[part])} (rank {rank} by the config, {out_features} "
                f"x {in_features} of the base model)",
            )
    a, b = _EMBEDDING if is_embedding else _LINEAR
    return ModulePlan(
        name,
        parts[a],
        parts[b],
        rank,
        check_scaling(name, config.scaling_of(name)),
        in_features,
        out_features,
        None if targets.is_embedding_module(name) else layer_of(name),
        module.kind,
        parts.get("lora_B.bias"),
        parts.get("lora_magnitude_vector"),
        parts.get("base_layer.weight"),
        parts.get("base_layer.bias"),
    )
