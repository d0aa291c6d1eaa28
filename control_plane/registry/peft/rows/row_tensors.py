"""Finds the tensors of an adapter's file that hold rows of the embedding or the head, and what each of them means.

PEFT writes such rows in four ways: as a module that was trained whole (`modules_to_save`), as rows of single tokens
(`trainable_token_indices`), as the embedding layers of a resized model, and as the base layer of a LoRA module.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from control_plane.errors import FieldViolation
from control_plane.registry.model.served_modules import ModuleKind
from control_plane.registry.peft.adapter_config import AdapterConfig
from control_plane.registry.peft.module_names import suffixes
from control_plane.registry.peft.problems import Problems
from control_plane.registry.peft.safetensors_header import TensorEntry, refuse
from control_plane.registry.peft.target_modules import TargetModules

_KEY_PREFIX = "base_model.model."
BASE_LAYER_WEIGHT = "base_layer.weight"  # beside LoRA: module_plans.py reads it
# Where PEFT puts a module that was trained whole, or wraps one: the name after the module's, and what it is.
_PARTS = {
    "weight": "weight",
    "bias": "bias",
    "modules_to_save.weight": "copy",  # written beside the first two if the model was resized
    "modules_to_save.bias": "copy of the bias",
    "original_module.weight": "unused",
    "original_module.bias": "unused",
    "token_adapter.base_layer.weight": "weight",
    "token_adapter.base_layer.bias": "bias",
    "token_adapter.trainable_tokens_delta": "delta",
}


@dataclass(frozen=True, slots=True)
class ModuleTensors:
    """What the file holds of one embedding or head."""

    weight: TensorEntry | None = None  # [tokens, hidden]: replaces the base's
    is_saved: bool = False  # of modules_to_save: a copy of the module's own, which no tie shares
    bias: TensorEntry | None = None  # [tokens], of a head beside its weight
    delta: TensorEntry | None = None  # [trained tokens, hidden]
    delta_ids: tuple[int, ...] = ()  # the token of each of its rows


@dataclass(frozen=True, slots=True)
class RowTensors:
    """Both, and the vocabulary that they make."""

    embedding: ModuleTensors
    head: ModuleTensors
    num_tokens: int | None  # rows of the weights; None: the file has none

    @property
    def is_empty(self) -> bool:
        """Whether the file holds no row of either."""
        return all(part.weight is None and part.delta is None for part in (self.embedding, self.head))


def take_row_tensors(
    entries: Mapping[str, TensorEntry], config: AdapterConfig | None, targets: TargetModules, problems: Problems
) -> tuple[RowTensors, dict[str, TensorEntry]]:
    """The rows that the file holds, and its other tensors. Notes what is missing or contradicts itself."""
    rest, found = dict(entries), {}
    for kind in (ModuleKind.EMBEDDING, ModuleKind.HEAD):
        found[kind] = ModuleTensors()
        name = embedding_or_head(targets, kind)
        if name is not None:
            with problems.collected():
                found[kind] = _of_module(name, rest, entries, config, targets)
    if config is not None:
        _check_names(config, targets, problems)
    embedding, head = found[ModuleKind.EMBEDDING], found[ModuleKind.HEAD]
    if targets.are_tied:
        embedding, head = _tied(embedding, head)
    sizes = {part.weight.shape[0] for part in (embedding, head) if part.weight is not None}
    if len(sizes) > 1:
        problems.add(
            FieldViolation(
                "base_layer.weight" if not config or not config.saved_modules else "modules_to_save",
                f"embedding and head have {' and '.join(map(str, sorted(sizes)))} tokens; save both from one model",
            )
        )
    return RowTensors(embedding, head, max(sizes, default=None)), rest


def embedding_or_head(targets: TargetModules, kind: ModuleKind) -> str | None:
    """The embedding or the head that takes adapters, if there is one."""
    return next((name for name, module in targets.served.items() if module.kind is kind), None)


def _of_module(
    name: str,
    rest: dict[str, TensorEntry],
    entries: Mapping[str, TensorEntry],
    config: AdapterConfig | None,
    targets: TargetModules,
) -> ModuleTensors:
    """The tensors of one module, which are taken out of `rest`."""
    prefix = f"{_KEY_PREFIX}{name}."
    has_weight = any(f"{prefix}{part}" in entries for part, what in _PARTS.items() if what in ("weight", "copy"))
    parts: dict[str, TensorEntry] = {}
    for part, what in _PARTS.items():
        if f"{prefix}{part}" in entries and (has_weight or what not in ("bias", "unused")):
            parts.setdefault(what, rest.pop(f"{prefix}{part}"))
    is_saved = config is not None and not config.saved_modules.isdisjoint(suffixes(name))
    weight = parts.get("weight", parts.get("copy"))
    if is_saved and weight is None:
        raise refuse("modules_to_save", f"names {name}, whose weight is not in the file; save the adapter again")
    if weight is None:
        weight = entries.get(f"{prefix}{BASE_LAYER_WEIGHT}")
    delta = parts.get("delta")
    ids = _trained_tokens(name, config, targets, has_delta=delta is not None)
    if delta is None and ids:
        raise refuse("trainable_token_indices", f"names {name}, whose rows are not in the file; save the adapter again")
    width = _width(name, targets)
    for entry in (weight, delta):
        if entry is not None and (len(entry.shape) != 2 or entry.shape[1] != width):
            raise refuse(entry.name, f"shape {list(entry.shape)}, expected rows of {width} values")
    bias = parts.get("bias", parts.get("copy of the bias"))
    if bias is not None and (weight is None or bias.shape != weight.shape[:1]):
        raise refuse(bias.name, f"shape {list(bias.shape)} is not that of the weight beside it")
    if delta is not None and config is not None:
        _check_trained_tokens(name, delta, ids, weight, targets)
    return ModuleTensors(weight, is_saved, bias, delta, ids)


def _trained_tokens(
    name: str, config: AdapterConfig | None, targets: TargetModules, *, has_delta: bool
) -> tuple[int, ...]:
    """The tokens that the configuration names for a module. Without a module's name they are the embedding's."""
    if config is None:
        return ()
    for target, ids in config.trained_tokens.items():
        if target in suffixes(name) or (not target and targets.is_input_embedding(name)):
            return ids
    embedding = embedding_or_head(targets, ModuleKind.EMBEDDING)
    if has_delta and targets.are_tied and embedding not in (None, name):
        return _trained_tokens(embedding, config, targets, has_delta=False)  # one list for both
    return ()


def _check_trained_tokens(
    name: str, delta: TensorEntry, ids: tuple[int, ...], weight: TensorEntry | None, targets: TargetModules
) -> None:
    field = "trainable_token_indices"
    if not ids:
        raise refuse(
            field, f"names no token of {name}, and the file has {delta.shape[0]} trained rows; list the tokens in order"
        )
    if len(ids) != delta.shape[0]:
        raise refuse(field, f"names {len(ids)} tokens of {name}, the file has {delta.shape[0]} rows of them")
    num_tokens = _vocab_size(name, targets) if weight is None else weight.shape[0]
    if max(ids) >= num_tokens:
        raise refuse(
            field,
            f"names token {max(ids)} of {num_tokens}; for new tokens save the resized embedding too "
            "(save_embedding_layers=True)",
        )
    own = targets.own(name)
    if not targets.is_input_embedding(name) and own is not None and own.bias is not None:
        raise refuse(field, f"names {name}, which has a bias that PEFT leaves out; train with modules_to_save instead")


def _tied(embedding: ModuleTensors, head: ModuleTensors) -> tuple[ModuleTensors, ModuleTensors]:
    """What each of two tied modules gets of the other: a base weight that was replaced, and trained tokens.

    A module of modules_to_save is a copy, and leaves the other one as it was.
    """
    return _follow(embedding, head, follows_tokens=False), _follow(head, embedding, follows_tokens=True)


def _follow(own: ModuleTensors, other: ModuleTensors, *, follows_tokens: bool) -> ModuleTensors:
    weight, delta, ids = own.weight, own.delta, own.delta_ids
    if weight is None and not other.is_saved:
        weight = other.weight
    if delta is None and follows_tokens and not own.is_saved:
        delta, ids = other.delta, other.delta_ids
    return ModuleTensors(weight, own.is_saved, own.bias, delta, ids)


def _check_names(config: AdapterConfig, targets: TargetModules, problems: Problems) -> None:
    """Note names of modules that the base model does not have."""
    known = {end for name in targets.served if targets.is_embedding_module(name) for end in suffixes(name)}
    for field, names in (
        ("modules_to_save", config.saved_modules),
        ("trainable_token_indices", {name for name in config.trained_tokens if name}),
    ):
        for name in sorted(set(names) - known):
            problems.add(FieldViolation(field, f"names {name}; this base model has no such embedding or head"))
    if "" in config.trained_tokens and embedding_or_head(targets, ModuleKind.EMBEDDING) is None:
        description = "names tokens; the embedding of this base model takes no adapters: train without it"
        problems.add(FieldViolation("trainable_token_indices", description))


def _width(name: str, targets: TargetModules) -> int:
    module = targets.served[name]
    return module.out_features if module.kind is ModuleKind.EMBEDDING else module.in_features


def _vocab_size(name: str, targets: TargetModules) -> int:
    module = targets.served[name]
    return module.in_features if module.kind is ModuleKind.EMBEDDING else module.out_features
