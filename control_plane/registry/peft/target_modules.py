"""Which modules of the base model adapters may change: by what the workers report, or by the checkpoint's headers
before any worker reported.

An immutable view for one registration, which may read it in a thread of its own.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from contract.expert_names import of_expert
from control_plane.registry.model.base_model import ROUTER_NAMES, BaseModel
from control_plane.registry.model.embedding_modules import EmbeddingModule, TensorsByModule, find_own
from control_plane.registry.model.served_modules import ModuleKind, Modules, ServedModule
from control_plane.registry.peft.module_names import suffixes
from control_plane.registry.peft.safetensors_header import CHECK_BASE


@dataclass(frozen=True)
class TargetModules:
    """The modules of one base model."""

    base_model: BaseModel
    served: dict[str, ServedModule]  # those that take adapters; of experts each one
    reported: Modules  # by the workers, those included that take no adapters; empty: not reported

    @classmethod
    def of(cls, base_model: BaseModel, reported: Modules) -> TargetModules:
        """The target modules that workers report, or those of the checkpoint where they report nothing."""
        if reported:
            served = {
                each: module
                for name, module in reported.items()
                if not module.reason
                for each in (
                    [of_expert(name, expert) for expert in range(module.num_experts)] if module.num_experts else [name]
                )
            }
            return cls(base_model, served, reported)
        served = {
            name: ServedModule(ModuleKind.LINEAR, in_features, out_features)
            for name, (out_features, in_features) in base_model.linear_shapes.items()
        }
        for name, module in base_model.embedding_modules.items():
            out_features, in_features = module.linear_shape
            kind = ModuleKind.EMBEDDING if module.is_input else ModuleKind.HEAD
            served[name] = ServedModule(kind, in_features, out_features)
        return cls(base_model, served, {})

    def is_embedding_module(self, name: str) -> bool:
        """Whether a module that takes adapters is the embedding or lm_head."""
        return self.served[name].kind in (ModuleKind.HEAD, ModuleKind.EMBEDDING)

    def is_input_embedding(self, name: str) -> bool:
        """Whether a module that takes adapters is the embedding."""
        return self.served[name].kind is ModuleKind.EMBEDDING

    @cached_property
    def experts(self) -> Modules:
        """The products of experts that take adapters, by names that stand for all experts of a layer."""
        return {name: module for name, module in self.reported.items() if module.num_experts and not module.reason}

    def own(self, name: str) -> EmbeddingModule | None:
        """The checkpoint's tensors of the head or the embedding; None for other modules, or if they are not found."""
        if not self.is_embedding_module(name):
            return None
        known = self.base_model.embedding_modules.get(name)
        return known or find_own(self.base_model.tensors, name, self.served[name])

    @property
    def are_tied(self) -> bool:
        """Whether embedding and head have one weight. A head whose weight is not found has the embedding's."""
        own = [self.own(name) for name in self.served if self.is_embedding_module(name)]
        return len(own) > 1 and len({module.weight for module in own if module is not None}) <= 1

    def has_weight(self, name: str) -> bool:
        """Whether the checkpoint has a weight that can only be this module's."""
        return self._weights.find(name) is not None

    def known_as(self, path: str) -> str | None:
        """The module that takes adapters and whose path ends in this one, if there is exactly one."""
        found = self._by_suffix.get(path, [])
        return found[0] if len(found) == 1 else None

    # These are made where something is wrong. An adapter with many bad names costs no more than one for each.

    @cached_property
    def _weights(self) -> TensorsByModule:
        return TensorsByModule(self.base_model.tensors, "weight")

    @cached_property
    def _by_suffix(self) -> dict[str, list[str]]:
        found: dict[str, list[str]] = {}
        for name in self.served:
            for suffix in suffixes(name):
                found.setdefault(suffix, []).append(name)
        return found

    @cached_property
    def _tails(self) -> frozenset[str]:
        return frozenset(map(_tail, self.base_model.linear_shapes))

    def refusal(self, name: str) -> str:
        """Why a module that is not among `served` takes no adapters."""
        module = self.reported.get(name)
        if module is not None:
            return f"{name} takes no adapters: {module.reason}; leave it out of target_modules"
        if self.reported:
            return f"the base model has no module {name}; {CHECK_BASE}"
        tail = _tail(name)
        if ".experts" in name or tail.rpartition(".")[2] in ROUTER_NAMES:
            return f"whether {name} takes adapters only a worker can tell: start one, then register the adapter again"
        if tail and tail in self._tails:
            return (
                f"the base model has {tail} in its layers, and whether as {name} only a worker can tell: start one, "
                "then register the adapter again"
            )
        if not self.base_model.linear_shapes:
            return (
                "which modules this base model has only a worker can tell: start one, then register the adapter again"
            )
        return f"the base model has no such linear in its decoder layers, nor embedding or head; {CHECK_BASE}"


def layer_of(name: str) -> int | None:
    """Index of the decoder layer that holds a module, or None if it lies outside of them."""
    return next((int(part) for part in name.split(".") if part.isdecimal()), None)


def _tail(name: str) -> str:
    """The path after the layer's index; empty outside of the layers."""
    parts = name.split(".")
    at = next((index for index, part in enumerate(parts) if part.isdecimal()), len(parts))
    return ".".join(parts[at + 1 :])
