"""TensorRT-LLM's 19 ids of LoRA modules, and where these modules are in transformers' models.

The ids are those of `LoraManager.LORA_MODULE_IDS`. TensorRT-LLM calls transformers' `gate_proj` mlp_h_to_4h and its
`up_proj` mlp_gate, whatever the descriptions of the two ids say: `hf_lora_convert.py` and `LoraManager` write them so.
Used by the server, which reads such rows, and by `motet convert`. No imports beyond the standard library.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass

GATE_UP = "mlp.gate_up_proj"  # one linear for both; a row has the outputs of up first, transformers those of gate


@dataclass(frozen=True, slots=True)
class LoraModule:
    """One id."""

    module_id: int
    name: str  # TensorRT-LLM's
    # Paths after the layer's index, over all architectures. The first that a layer has is the module.
    paths: tuple[str, ...] = ()
    needs: str = ""  # a path that the layer must have beside it; empty: none
    # The ids that have the module's outputs one after the other, in layers without such a module.
    halves: tuple[int, ...] = ()

    def __str__(self) -> str:
        return f"{self.module_id} ({self.name})"


_DOWN = ("mlp.down_proj", "mlp.dense_4h_to_h", "mlp.c_proj", "mlp.fc2", "fc2", "mlp.fc_out", "ffn.down_proj")
_UP_ALONE = ("mlp.dense_h_to_4h", "mlp.c_fc", "mlp.fc1", "fc1", "mlp.fc_in", "ffn.up_proj", "mlp.up_proj")
_QKV = ("self_attn.qkv_proj", "attention.query_key_value", "self_attention.query_key_value", "attn.c_attn")
_DENSE = ("self_attn.o_proj", "self_attn.dense", "self_attn.out_proj", "attention.dense", "self_attention.dense")

MODULES = (
    LoraModule(0, "attn_qkv", (*_QKV, "attn.qkv_proj", "attn.Wqkv"), halves=(1, 2, 3)),
    LoraModule(1, "attn_q", ("self_attn.q_proj", "attn.q_proj", "attn.attention.q_proj")),
    LoraModule(2, "attn_k", ("self_attn.k_proj", "attn.k_proj", "attn.attention.k_proj")),
    LoraModule(3, "attn_v", ("self_attn.v_proj", "attn.v_proj", "attn.attention.v_proj")),
    LoraModule(4, "attn_dense", (*_DENSE, "attn.c_proj", "attn.out_proj", "attn.attention.out_proj")),
    LoraModule(5, "mlp_h_to_4h", ("mlp.gate_proj", GATE_UP, *_UP_ALONE)),
    LoraModule(6, "mlp_4h_to_h", _DOWN),
    LoraModule(7, "mlp_gate", ("mlp.up_proj",), needs="mlp.gate_proj"),
    LoraModule(8, "cross_attn_qkv"),
    LoraModule(9, "cross_attn_q"),
    LoraModule(10, "cross_attn_k"),
    LoraModule(11, "cross_attn_v"),
    LoraModule(12, "cross_attn_dense"),
    LoraModule(13, "moe_h_to_4h"),
    LoraModule(14, "moe_4h_to_h"),
    LoraModule(15, "moe_gate"),
    LoraModule(16, "moe_router", ("mlp.gate", "block_sparse_moe.gate", "mlp.router")),
    LoraModule(17, "mlp_router", ("mlp.shared_expert_gate",)),
    LoraModule(18, "mlp_gate_up", (GATE_UP,), halves=(7, 5)),
)
CROSS_ATTENTION = frozenset(range(8, 13))
EXPERTS = frozenset((13, 14, 15))
_EXPERT = re.compile(r"(?:mlp|block_sparse_moe)\.experts\.(\d{1,6})\.(gate_proj|down_proj|up_proj|w[123])")
_ID_OF_PRODUCT = {"gate_proj": 13, "down_proj": 14, "up_proj": 15, "w1": 13, "w2": 14, "w3": 15}

assert [module.module_id for module in MODULES] == list(range(19)), "an id is its place"


def paths_of(module: LoraModule, layer: Collection[str]) -> tuple[str, ...]:
    """The modules of a layer whose outputs a row of this id has, in the row's order. Empty: the layer has none.

    `layer` holds the paths of the layer's modules.
    """
    if not module.needs or module.needs in layer:
        found = next((path for path in module.paths if path in layer), None)
        if found is not None:
            return (found,)
    parts = [paths_of(MODULES[half], layer) for half in module.halves]
    return tuple(path for part in parts for path in part) if parts and all(parts) else ()


def id_of(path: str, *, is_gated: bool) -> int | None:
    """The id that TensorRT-LLM's tools give a module, or None if they have none for it.

    is_gated: whether the model's MLP has a gate. Without one, `up_proj` is its first linear.
    """
    if path == GATE_UP:
        return 18
    if path == "mlp.up_proj":
        return 7 if is_gated else 5
    return next((module.module_id for module in MODULES if path in module.paths), None)


def expert_of(path: str) -> tuple[int, int] | None:
    """The id and the expert of a product that is a linear of one expert; None for any other module."""
    match = _EXPERT.fullmatch(path)
    return None if match is None else (_ID_OF_PRODUCT[match[2]], int(match[1]))
