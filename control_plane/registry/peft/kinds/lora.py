"""LoRA (Hu et al., arXiv 2106.09685), with and without the bias of lora_B. rsLoRA differs in its scaling only."""

from __future__ import annotations

from control_plane.registry.peft.kinds.adapter_kind import AdapterKind, Part

PART_A = Part("lora_A", (".lora_A.weight",), "a", ("rank", "in_features"))
PART_B = Part("lora_B", (".lora_B.weight",), "b", ("out_features", "rank"), is_transposed=True)
PART_BIAS = Part("lora_B.bias", (".lora_B.bias",), "bias", ("out_features",), flag="lora_bias", is_vector=True)
EMBEDDING_PART_A = Part("lora_embedding_A", (".lora_embedding_A",), "a", ("rank", "in_features"))
EMBEDDING_PART_B = Part("lora_embedding_B", (".lora_embedding_B",), "b", ("out_features", "rank"), is_transposed=True)

LORA = AdapterKind("lora", "", (PART_A, PART_B), (EMBEDDING_PART_A, EMBEDDING_PART_B))
LORA_WITH_BIAS = AdapterKind("lora", "lora_bias", (PART_A, PART_B, PART_BIAS), ())
