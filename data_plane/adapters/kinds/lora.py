"""LoRA (Hu et al., arXiv 2106.09685) and rsLoRA (arXiv 2312.03732), which differ in their scaling only."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar

from data_plane.adapters.kinds.adapter_kind import PART_A, PART_B, AdapterKind, PackedModule, Part

if TYPE_CHECKING:
    import torch


class Lora(AdapterKind):
    """A and B alone."""

    name = "lora"
    parts: ClassVar[tuple[Part, ...]] = (PART_A, PART_B)

    def vectors(self, packed: PackedModule) -> Mapping[str, torch.Tensor]:  # noqa: ARG002  # there are none
        """See AdapterKind."""
        return {}


class LoraWithBias(AdapterKind):
    """A, B and the bias of PEFT's lora_B (`lora_bias=True`), which is scaled with the product."""

    name = "lora"
    parts: ClassVar[tuple[Part, ...]] = (PART_A, PART_B, Part("bias", ("out_features",), "float32"))
    tables = ("lora_bias",)

    def vectors(self, packed: PackedModule) -> Mapping[str, torch.Tensor]:
        """See AdapterKind."""
        return {"lora_bias": packed.tensors["bias"]}
