"""A bias of the base model that was trained beside an adapter (`bias` of "all" or "lora_only").

A module of any kind may have one. With "all", a linear without an adapter may have one too.
"""

from __future__ import annotations

from control_plane.registry.peft.kinds.adapter_kind import Part

PART_BASE_BIAS = Part("base_layer.bias", (".base_layer.bias",), "base_bias", ("out_features",), is_vector=True)
