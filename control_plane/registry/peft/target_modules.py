"""Which modules of the base model adapters may change: by what the workers report, or by the checkpoint's headers
before any worker reported.

An immutable view for one registration, which may read it in a thread of its own.
"""

from __future__ import annotations

from dataclasses import dataclass

from control_plane.registry.model.base_model import BaseModel
from control_plane.registry.model.embedding_modules import EmbeddingModule, find_own
from control_plane.registry.model.served_modules import ModuleKind, Modules, ServedModule
from control_plane.registry.peft.safetensors_header import CHECK_BASE


@dataclass(frozen=True)
class TargetModules:
    """The modules of one base model."""

    base_model: BaseModel
    served: dict[str, ServedModule]  # those that take adapters
    reported: Modules  # by the workers, those included that take no adapters; empty: not reported

    @classmethod
    def of(cls, base_model: BaseModel, reported: Modules) -> TargetModules:
        """By what the workers report, or by the checkpoint where they report nothing."""
        if reported:
            return cls(base_model, {name: module for name, module in reported.items() if not module.reason}, reported)
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
        return self.served[name].kind is not ModuleKind.LINEAR

    def is_input_embedding(self, name: str) -> bool:
        """Whether a module that takes adapters is the embedding."""
        return self.served[name].kind is ModuleKind.EMBEDDING

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

    def refusal(self, name: str) -> str:
        """Why a module that is not among `served` takes no adapters."""
        module = self.reported.get(name)
        if module is not None:
            return f"{name} takes no adapters: {module.reason}; leave it out of target_modules"
        if self.reported:
            return f"the base model has no module {name}; {CHECK_BASE}"
        tail = _tail(name)
        if tail and any(_tail(known) == tail for known in self.base_model.linear_shapes):
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
    """The path behind the layer's index; empty outside of the layers."""
    parts = name.split(".")
    at = next((index for index, part in enumerate(parts) if part.isdecimal()), len(parts))
    return ".".join(parts[at + 1 :])
