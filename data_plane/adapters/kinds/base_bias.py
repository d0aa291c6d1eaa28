"""A bias of the base model that was trained beside an adapter, or alone. The arena keeps its difference from the base.

The difference is stored as a LoRA bias. An expand multiplies a LoRA bias by the scaling and by the DoRA scale, so the
difference is divided by both.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from data_plane.adapters.kinds.adapter_kind import AdapterKind, PackedModule, Part
from data_plane.adapters.kinds.dora import Dora
from data_plane.adapters.kinds.lora import Lora, LoraWithBias

if TYPE_CHECKING:
    import torch

_PART = Part("base_bias", ("out_features",), "float32")


class BaseBias(AdapterKind):
    """The bias alone. Its A and B are zeros."""

    name = "lora"
    parts = (_PART,)
    tables = ("lora_bias",)

    def vectors(self, packed: PackedModule) -> Mapping[str, torch.Tensor]:
        """See AdapterKind."""
        return {"lora_bias": _added(packed, None)}


class LoraWithBaseBias(Lora):
    """A, B and a trained bias of the base."""

    parts = (*Lora.parts, _PART)
    tables = ("lora_bias",)

    def vectors(self, packed: PackedModule) -> Mapping[str, torch.Tensor]:
        """See AdapterKind."""
        return _with_base_bias(super().vectors(packed), packed)


class LoraWithBiases(LoraWithBias):
    """A, B, the bias of lora_B and a trained bias of the base."""

    parts = (*LoraWithBias.parts, _PART)

    def vectors(self, packed: PackedModule) -> Mapping[str, torch.Tensor]:
        """See AdapterKind."""
        return _with_base_bias(super().vectors(packed), packed)


class DoraWithBaseBias(Dora):
    """A, B, a magnitude and a trained bias of the base, which DoRA does not scale."""

    parts = (*Dora.parts, _PART)
    tables = (*Dora.tables, "lora_bias")

    def vectors(self, packed: PackedModule) -> Mapping[str, torch.Tensor]:
        """See AdapterKind."""
        return _with_base_bias(super().vectors(packed), packed)


def _with_base_bias(inner: Mapping[str, torch.Tensor], packed: PackedModule) -> Mapping[str, torch.Tensor]:
    added, own = _added(packed, inner.get("dora_scale")), inner.get("lora_bias")
    return {**inner, "lora_bias": added if own is None else own + added}


def _base_bias(packed: PackedModule) -> torch.Tensor:
    bias = packed.base.bias(packed.sizes.name)
    if bias is None:
        raise ValueError("base_bias is given, and the linear of the base model has no bias")
    return bias


def _added(packed: PackedModule, dora_scale: torch.Tensor | None) -> torch.Tensor:
    """float32 [out] on the host: what an expand turns into the trained bias less the base's."""
    difference, scaling = packed.tensors["base_bias"] - _base_bias(packed).float().cpu(), packed.sizes.scaling
    value = difference / (scaling if dora_scale is None else scaling * dora_scale)
    if not bool(value.isfinite().all()):
        raise ValueError(f"base_bias cannot be added where the scaling is {scaling:g} or a DoRA scale is 0")
    return value
