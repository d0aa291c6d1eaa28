"""DoRA (Liu et al., arXiv 2402.09353, section 4): LoRA with a magnitude for each output."""

from __future__ import annotations

from control_plane.registry.peft.kinds.adapter_kind import AdapterKind, Part
from control_plane.registry.peft.kinds.lora import EMBEDDING_PART_A, EMBEDDING_PART_B, PART_A, PART_B

PART_MAGNITUDE = Part(
    "lora_magnitude_vector",
    (".lora_magnitude_vector", ".lora_magnitude_vector.weight"),  # PEFT reads both
    "magnitude",
    ("out_features",),
    flag="use_dora",
    is_vector=True,
)

DORA = AdapterKind(
    "dora",
    "use_dora",
    (PART_A, PART_B, PART_MAGNITUDE),
    (EMBEDDING_PART_A, EMBEDDING_PART_B, PART_MAGNITUDE),
)

# What TensorRT-LLM keeps in the magnitude's place: the magnitude over the norm of the changed weight's rows. Never in
# PEFT's files.
PART_DORA_SCALE = Part("dora_scale", (), "dora_scale", ("out_features",), is_vector=True)
