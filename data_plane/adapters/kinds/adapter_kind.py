"""What distinguishes one kind of adapter from the others on a worker.

The manifest reader, the chunk reader, the placement and the writer ask the kind; none of them knows a kind by name.
No torch here at import: the manifest reader runs without it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Protocol

from data_plane.adapters.kinds.base_weights import BaseWeights

if TYPE_CHECKING:
    import torch


class ModuleSizes(Protocol):
    """One target module of an adapter, as the manifest describes it."""

    @property
    def name(self) -> str: ...
    @property
    def rank(self) -> int: ...
    @property
    def scaling(self) -> float: ...
    @property
    def in_features(self) -> int: ...
    @property
    def out_features(self) -> int: ...


@dataclass(frozen=True, slots=True)
class Part:
    """One tensor of a module in a chunk: `<module>.<name>` there, `<name>_sha256` in the manifest."""

    name: str
    sides: tuple[str, ...]  # its shape, as attributes of ModuleSizes
    dtype: str | None = None  # None: the adapter's own

    @property
    def is_vector(self) -> bool:
        """Whether it counts as a vector of the arena (contract.packed_layout.ModuleSize)."""
        return self.dtype is not None

    def shape(self, module: ModuleSizes) -> tuple[int, ...]:
        """The shape that the tensor has for this module."""
        return tuple(getattr(module, side) for side in self.sides)


PART_A = Part("a", ("rank", "in_features"))
PART_B = Part("b", ("rank", "out_features"))


@dataclass(frozen=True, slots=True)
class PackedModule:
    """One module as it was read, and the base model that it belongs to."""

    sizes: ModuleSizes
    tensors: Mapping[str, torch.Tensor]  # by part, on the host, checked against the manifest
    base: BaseWeights


class AdapterKind(ABC):
    """One kind of adapter. A module belongs to the kind whose parts it has."""

    name: ClassVar[str]  # the manifest's word; that of an rsLoRA has "rs" before it
    parts: ClassVar[tuple[Part, ...]]  # tensors of a module
    tables: ClassVar[tuple[str, ...]] = ()  # vector tables of kernels.lora.Epilogue that every module of the kind fills

    @property
    def has_matrices(self) -> bool:
        """Whether a module has A and B. In an arena, those of one that has none are zeros."""
        return PART_A in self.parts

    @abstractmethod
    def vectors(self, packed: PackedModule) -> Mapping[str, torch.Tensor]:
        """What the arena keeps of a module beside A and B: float32 [out_features] on the host, by vector table.

        Runs once per module on a loader thread, on a GPU in a stream beside that of the steps. Raises ValueError for
        tensors that cannot be served.
        """
