"""Matches the tensors of an adapter's file with its configuration and the base model, module by module.

Called by ingest.py, before any value is read. Every name, shape and rank that does not fit is noted by name.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from contract.packed_layout import ModuleSize
from control_plane.errors import FieldViolation, InvalidAdapter
from control_plane.registry.model.served_modules import ModuleKind
from control_plane.registry.peft.adapter_config import AdapterConfig
from control_plane.registry.peft.config_fields import EMBEDDING_NAMES
from control_plane.registry.peft.experts.tensors import ExpertTensors, is_named, missing_experts
from control_plane.registry.peft.kinds import parts_of_all_kinds
from control_plane.registry.peft.kinds.adapter_kind import AdapterKind, Part
from control_plane.registry.peft.problems import Problems
from control_plane.registry.peft.safetensors_header import CHECK_BASE, TensorEntry, refuse, shorten
from control_plane.registry.peft.target_modules import TargetModules, layer_of
from control_plane.registry.peft.tensor_names import BASE_BIAS, BASE_WEIGHT, split_key

_TIED_NAMES = ("embed_tokens", "lm_head")  # PEFT ties no adapters where target_modules has neither, as on GPT-2's wte


@dataclass(frozen=True, slots=True)
class ModulePlan:
    """One linear that the adapter changes, or the embedding, which leads from the vocabulary."""

    name: str
    tensors: tuple[tuple[Part, TensorEntry], ...]  # in the order in which they are packed
    rank: int
    scaling: float
    in_features: int
    out_features: int
    layer: int | None  # the decoder layer that holds it; None: outside of them
    kind: ModuleKind
    base_bias: TensorEntry | None  # the base's own bias, trained or not
    num_tokens: int | None = None  # of the vocabulary that the tensors are for; None: the base model's

    @property
    def size(self) -> ModuleSize:
        """What the module's size in an arena depends on."""
        num_vectors = sum(part.is_vector for part, _ in self.tensors)
        is_head = self.kind is ModuleKind.HEAD
        return ModuleSize(self.rank, self.in_features, self.out_features, self.is_embedding, is_head, num_vectors)

    @property
    def is_embedding(self) -> bool:
        return self.kind is ModuleKind.EMBEDDING

    @property
    def has_magnitude(self) -> bool:
        return any(part.packed_name == "magnitude" for part, _ in self.tensors)

    @property
    def has_lora_bias(self) -> bool:
        return any(part.packed_name == "bias" for part, _ in self.tensors)

    def packed_size(self, part: Part) -> tuple[int, ...] | None:
        """Shape of a part for the base model's vocabulary, as PEFT's file has it; None: as it is."""
        if self.num_tokens is None:
            return None
        return part.shape(rank=self.rank, in_features=self.in_features, out_features=self.out_features)


def plan_modules(
    config: AdapterConfig | None,
    tensors: ExpertTensors,
    targets: TargetModules,
    problems: Problems,
    num_tokens: int | None = None,
) -> list[ModulePlan]:
    """What the adapter changes, ordered by name. Notes all that is wrong; then modules may be left out.

    num_tokens: the vocabulary of the adapter's embedding and head; None: the base model's.
    config: None if it cannot be read. Then the names of the tensors are checked and nothing else.
    """
    found, has_bad_names = _by_module(tensors.entries, targets, problems)
    has_bad_names |= tensors.has_bad_names
    if config is None:
        return []
    _check_ties(config, found, targets, problems)
    plans = []
    for name in sorted(found):
        is_embedding = targets.is_input_embedding(name)
        wanted = config.kind.parts_of(is_embedding=is_embedding)
        if has_bad_names and not all(part.name in found[name] for part in wanted):
            continue  # the missing part may be there under one of the bad names
        with problems.collected():
            _check_parts(name, found[name], config.kind, is_embedding=is_embedding)
            packed, named = tuple((part, found[name][part.name]) for part in wanted), tensors.names.get(name, name)
            rank, scaling = config.rank_of(named, num_rows=packed[0][1].shape[0]), 0.0
            with problems.collected():
                scaling = config.scaling_of(named, rank)
            plans.append(_plan_module(name, found[name], packed, rank, scaling, targets, num_tokens))
    check_targets(config, tensors.names, found, targets, problems, is_complete=not has_bad_names)
    return plans


def _by_module(
    entries: Mapping[str, TensorEntry], targets: TargetModules, problems: Problems
) -> tuple[dict[str, dict[str, TensorEntry]], bool]:
    """The tensors by module and part, and whether there are others, which are noted."""
    found: dict[str, dict[str, TensorEntry]] = {}
    has_bad_names = False
    for entry in entries.values():
        try:
            module, part = split_key(entry.name, targets)
            parts = found.setdefault(module, {})
            if part in parts:
                raise refuse(shorten(entry.name), f"appears twice (also as {shorten(parts[part].name)}); remove one")
            parts[part] = entry
        except InvalidAdapter as error:
            problems.note(error)
            has_bad_names = True
    return found, has_bad_names


def _check_ties(config: AdapterConfig, found: Collection[str], targets: TargetModules, problems: Problems) -> None:
    adapted = sorted(filter(targets.is_embedding_module, found))
    named = config.targets.names or adapted
    is_tied = config.ties_weights and any(name.rpartition(".")[2] in _TIED_NAMES for name in named)
    if is_tied and targets.are_tied and len(adapted) == 1:
        description = (
            f"is true, the base model ties embedding and head, and the file has tensors of {adapted[0]} alone; save "
            "the adapter with PEFT 0.19 or later, which writes those of both"
        )
        problems.add(FieldViolation("ensure_weight_tying", description))


def check_targets(
    config: AdapterConfig,
    in_config: Mapping[str, str],
    found: Mapping[str, object],
    targets: TargetModules,
    problems: Problems,
    *,
    is_complete: bool,
) -> None:
    """Note every difference between the modules that the configuration names and those that have tensors.

    in_config: names in the configuration that differ from the base model's. is_complete: all tensors are among those of
    `found`.
    """
    names, served = config.targets, targets.served
    linears = {name for name in served if served[name].kind not in (ModuleKind.EXPERT, ModuleKind.ROUTER)}
    targeted = {name for name in linears if names.may_have(name, is_linear=not targets.is_embedding_module(name))}
    if config.ties_weights and targets.are_tied and any(map(targets.is_embedding_module, targeted)):
        targeted |= {
            name for name in found if name in linears and targets.is_embedding_module(name)
        }  # PEFT adapts both
    in_mixtures = {name for name in found if name not in linears and is_named(name, in_config, config)}
    for name in sorted(set(found) - targeted - in_mixtures):
        problems.add(
            FieldViolation("target_modules", f"does not name {name}, for which there are tensors; PEFT would drop them")
        )
    embedding_modules = [name for name in served if targets.is_embedding_module(name)]
    named = [name for name in names.names or () if name.rsplit(".", 1)[-1] in EMBEDDING_NAMES]
    for target in sorted(named):
        if not any(name == target or name.endswith("." + target) for name in embedding_modules):
            problems.add(
                FieldViolation("target_modules", f"names {target}; this base model has no such embedding or head")
            )
    for name in sorted(targeted - set(found)) if is_complete and not names.has_expression else ():
        part = next(iter(parts_of_all_kinds(is_embedding=targets.is_input_embedding(name))))
        problems.add(
            FieldViolation(f"{name}.{part}", "is missing, target_modules names the module; save the adapter again")
        )
    for violation in missing_experts(found, config, targets, in_config) if is_complete else ():
        problems.add(violation)


def _check_parts(name: str, found: Mapping[str, TensorEntry], kind: AdapterKind, *, is_embedding: bool) -> None:
    """Refuse a target module that lacks a part of its kind, or has a part that is not of its kind."""
    possible = parts_of_all_kinds(is_embedding=is_embedding)
    # 1. Parts that only the other sort of module can have.
    for part_name in sorted(parts_of_all_kinds(is_embedding=not is_embedding).keys() - possible.keys()):
        if part_name in found:
            expected = " and ".join(part.name for part in possible.values() if not part.is_vector)
            sort = "an embedding" if is_embedding else "a linear"
            raise refuse(f"{name}.{part_name}", f"does not belong to {sort}, which has {expected}; {CHECK_BASE}")
    # 2. A kind that the module cannot have.
    wanted = {part.name: part for part in kind.parts_of(is_embedding=is_embedding)}
    if not wanted:
        raise refuse(kind.flag, f"is true and target_modules names {name}; PEFT has no {kind.flag} on embeddings")
    # 3. Parts that are missing, then parts that PEFT would not read.
    for part in wanted.values():
        if part.name not in found:
            reason = f"{part.flag} is true" if part.flag else f"{min(found)} is in the file"
            raise refuse(f"{name}.{part.name}", f"is missing, but {reason}; save the adapter again")
    for part in possible.values():
        if part.name in found and part.name not in wanted:
            raise refuse(
                f"{name}.{part.name}",
                f"is in the file, but {part.flag} is not true, and PEFT would drop it; save the adapter again",
            )


def _plan_module(
    name: str,
    parts: Mapping[str, TensorEntry],
    tensors: tuple[tuple[Part, TensorEntry], ...],
    rank: int,
    scaling: float,
    targets: TargetModules,
    num_tokens: int | None,
) -> ModulePlan:
    """The module, if the shapes of all its parts fit. `tensors` are those that are packed."""
    module = targets.served[name]
    out_features, in_features = module.out_features, module.in_features
    is_embedding = targets.is_input_embedding(name)
    if not targets.is_embedding_module(name) or num_tokens == (in_features if is_embedding else out_features):
        num_tokens = None
    if num_tokens is not None:
        in_features, out_features = (num_tokens, out_features) if is_embedding else (in_features, num_tokens)
    shapes = {
        part.name: part.shape(rank=rank, in_features=in_features, out_features=out_features) for part, _ in tensors
    }
    shapes[BASE_WEIGHT] = (in_features, out_features) if is_embedding else (out_features, in_features)
    shapes[BASE_BIAS] = (out_features,)
    own = targets.own(name)
    if BASE_BIAS in parts and targets.is_embedding_module(name) and (own is None or own.bias is None):
        raise refuse(f"{name}.{BASE_BIAS}", f"is in the file, but the base model has no such bias; {CHECK_BASE}")
    for part_name, entry in parts.items():
        if entry.shape != shapes[part_name]:
            raise refuse(
                f"{name}.{part_name}",
                f"shape {list(entry.shape)}, expected {list(shapes[part_name])} (rank {rank} by the config, "
                f"{out_features} x {in_features} of the base model)",
            )
    return ModulePlan(
        name=name,
        tensors=tensors,
        rank=rank,
        scaling=scaling,
        in_features=module.in_features,
        out_features=module.out_features,
        layer=None if targets.is_embedding_module(name) else layer_of(name),
        kind=module.kind,
        base_bias=parts.get(BASE_BIAS),
        num_tokens=num_tokens,
    )
