"""LoRA (Hu et al., arXiv 2106.09685) and rsLoRA (arXiv 2312.03732), which differ in their scaling only."""

from __future__ import annotations

from typing import ClassVar

from data_plane.adapters.kinds.adapter_kind import PART_A, PART_B, AdapterKind, ArenaWeights, PackedModule, Part


class Lora(AdapterKind):
    """A and B alone."""

    name = "lora"
    parts: ClassVar[tuple[Part, ...]] = (PART_A, PART_B)

    def weights(self, packed: PackedModule) -> ArenaWeights:
        """See AdapterKind."""
        return ArenaWeights(packed.tensors["a"], packed.tensors["b"])


class LoraWithBias(AdapterKind):
    """A, B and the bias of PEFT's lora_B (`lora_bias=True`), which is scaled with the product."""

    name = "lora"
    parts: ClassVar[tuple[Part, ...]] = (PART_A, PART_B, Part("bias", ("out_features",), "float32"))
    tables = ("lora_bias",)

    def weights(self, packed: PackedModule) -> ArenaWeights:
        """See AdapterKind."""
        return ArenaWeights(packed.tensors["a"], packed.tensors["b"], {"lora_bias": packed.tensors["bias"]})
