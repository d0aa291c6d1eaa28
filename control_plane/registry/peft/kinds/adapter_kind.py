"""What distinguishes one kind of adapter from the others in PEFT's files and in the packed layout.

The code that reads the configuration, matches the tensors and packs them uses the kind, and knows none by its name.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Part:
    """One tensor of a target module: `{module}{suffix}` in PEFT's file, `{module}.{packed_name}` in a chunk."""

    name: str  # for messages
    suffixes: tuple[str, ...]  # how its name may end in PEFT's file
    packed_name: str  # in the manifest: `{packed_name}_sha256`
    sides: tuple[str, ...]  # its shape in PEFT's file: of "rank", "in_features" and "out_features"
    flag: str = ""  # the field of adapter_config.json without which PEFT does not read it; empty: none
    is_transposed: bool = False  # in the packed layout
    # Packed as float32, whatever the adapter's dtype, and kept by an arena in a table beside its pages.
    is_vector: bool = False

    def shape(self, *, rank: int, in_features: int, out_features: int) -> tuple[int, ...]:
        """The shape that the tensor has for a target module."""
        sizes = {"rank": rank, "in_features": in_features, "out_features": out_features}
        return tuple(sizes[side] for side in self.sides)


@dataclass(frozen=True, slots=True)
class AdapterKind:
    """One kind of adapter: the parts of its target modules, in the order in which they are packed."""

    name: str  # the manifest's word; that of an rsLoRA has "rs" before it
    flag: str  # the field of adapter_config.json that is true for this kind; empty: none
    linear_parts: tuple[Part, ...]
    embedding_parts: tuple[Part, ...]  # of the input embedding; empty: PEFT has no such adapter on embeddings

    def parts_of(self, *, is_embedding: bool) -> tuple[Part, ...]:
        """The parts of one target module."""
        return self.embedding_parts if is_embedding else self.linear_parts
