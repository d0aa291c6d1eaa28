"""Compiles the LoRA kernels for an H200, which needs no GPU. Prints a line of JSON for each; run by its test.

A process of its own, since triton either interprets or compiles.
"""

from __future__ import annotations

import json
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from kernels.lora import triton_embedding, triton_expand, triton_route, triton_shrink

H200 = GPUTarget("cuda", 90, 32)
SIZES_OF_16 = ("in_features", "stride_xt", "stride_yt", "stride_ht", "stride_table")


def compile_kernel(kernel: Any, dtype: str, constants: dict[str, Any], num_stages: int) -> None:
    """With pointers of `dtype`, but for the indices and float32 tables."""
    signature: dict[str, str] = {}
    for name in kernel.arg_names:
        if name in constants:
            signature[name] = "constexpr"
        elif name in ("x_ptr", "y_ptr", "pages_ptr"):
            signature[name] = f"*{dtype}"
        elif name in ("h_ptr", "scaling_ptr", "gain_ptr", "lora_bias_ptr", "base_bias_ptr"):
            signature[name] = "*fp32"
        elif name == "token_ids_ptr":
            signature[name] = "*i64"
        elif name.endswith("_ptr"):
            signature[name] = "*i32"
        else:
            signature[name] = "fp32" if name == "scaling" else "i32"
    position = {name: index for index, name in enumerate(kernel.arg_names)}
    aligned = [name for name in kernel.arg_names if name.endswith("_ptr") or name in SIZES_OF_16]
    source = ASTSource(
        fn=kernel,
        signature=signature,
        constexprs={(position[name],): value for name, value in constants.items()},
        attrs={(position[name],): [["tt.divisibility", 16]] for name in aligned},
    )
    compiled = triton.compile(source, target=H200, options={"num_warps": 4, "num_stages": num_stages})
    ptx = compiled.asm["ptx"]
    line = {"kernel": kernel.__name__, "dtype": dtype, "shared_bytes": compiled.metadata.shared}
    line |= {"num_mma": ptx.count("mma.sync"), "num_wgmma": ptx.count("wgmma")}
    line |= {"num_single_loads": ptx.count("ld.global.b16"), "num_copies_of_16": ptx.count("cp.async.cg")}
    print(json.dumps(line), flush=True)


def main() -> None:
    shared = {"BLOCK_T": 32, "TILE_WIDTH": 1024, "PAGE_RANKS": 8}
    shrink = {"BLOCK_R": 64, "BLOCK_K": 128, "NUM_PARTS": 8, "PART_STEPS": 4, "HAS_PLANES": True, "stride_xk": 1}
    compile_kernel(triton_shrink.shrink_kernel, "bf16", shrink | shared, num_stages=3)
    expand = {"BLOCK_R": 32, "BLOCK_N": 128, "NUM_PLANES": 8, "H_ALIGN": 4, "ADD_INPUTS": True, "stride_yn": 1}
    expand |= {"HAS_GAIN": True, "HAS_LORA_BIAS": True, "HAS_BASE_BIAS": True}
    expand |= {"OUT_FEATURES": (4096, 1024, 1024), "NUM_SITES": 3, "ALIGN": 16}
    compile_kernel(triton_expand.expand_kernel, "bf16", expand | shared, num_stages=1)
    embed = {"BLOCK_T": 16, "BLOCK_R": 16, "TILE_WIDTH": 1024, "PAGE_RANKS": 8}
    compile_kernel(triton_embedding.embed_kernel, "bf16", embed, num_stages=3)
    compile_kernel(triton_route.count_kernel, "i32", {"BLOCK": 1024}, num_stages=3)
    compile_kernel(triton_route.place_kernel, "i32", {"BLOCK": 1024, "SLOTS": 256}, num_stages=3)


if __name__ == "__main__":
    main()
