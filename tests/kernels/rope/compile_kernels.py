"""Compiles the rope kernel for an H200, which needs no GPU. Prints a line of JSON for each form; run by its test.

A process of its own, since triton either interprets or compiles.
"""

from __future__ import annotations

import json
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from kernels.rope.triton_kernel import BLOCK_HEADS, _rope_kernel

H200 = GPUTarget("cuda", 90, 32)


def compile_kernel(dim: int, rotary_dim: int, *, has_norm: bool, has_positions: bool) -> None:
    """32 heads over 8 of keys in bfloat16, tables in float32."""
    half = rotary_dim // 2
    constants: dict[str, Any] = {
        "NUM_HEADS": 32,
        "NUM_KV_HEADS": 8,
        "DIM": dim,
        "VALUE_DIM": dim,
        "HALF": half,
        "BLOCK_HEADS": BLOCK_HEADS,
        "BLOCK_HALF": triton.next_power_of_2(half),
        "BLOCK_REST": triton.next_power_of_2(max(dim - rotary_dim, 1)),
        "BLOCK_DV": triton.next_power_of_2(dim),
        "QUERY_TILES": 32 // BLOCK_HEADS,
        "HAS_NORM": has_norm,
        "HAS_POSITIONS": has_positions,
        "HAS_CACHE": True,
    }
    kinds = {"positions_ptr": "*i64", "slot_mapping_ptr": "*i64", "cos_ptr": "*fp32", "sin_ptr": "*fp32"}
    kinds |= {"eps": "fp32", "weight_offset": "fp32"}
    signature = {
        name: "constexpr" if name in constants else kinds.get(name, "*bf16" if name.endswith("_ptr") else "i32")
        for name in _rope_kernel.arg_names
    }
    position = {name: index for index, name in enumerate(_rope_kernel.arg_names)}
    source = ASTSource(
        fn=_rope_kernel,
        signature=signature,
        constexprs={(position[name],): value for name, value in constants.items()},
        attrs={(position[name],): [["tt.divisibility", 16]] for name, kind in signature.items() if kind[0] in "*i"},
    )
    compiled = triton.compile(source, target=H200, options={"num_warps": 1})
    text = compiled.asm["ptx"]
    num_vectors = text.count(".v4.b32") + text.count(".v2.b32")
    print(json.dumps({"num_vector_loads": num_vectors, "num_spills": text.count(".local")}))


if __name__ == "__main__":
    compile_kernel(128, 128, has_norm=False, has_positions=True)
    compile_kernel(128, 128, has_norm=True, has_positions=False)
    compile_kernel(80, 32, has_norm=True, has_positions=False)
