"""Compiles the LoRA kernels for an H200, which needs no GPU. Prints a line of JSON for each; run by its test.

A process of its own, since triton either interprets or compiles.
"""

from __future__ import annotations

import json
import re
from typing import Any

from kernels.gated_activation import triton_folded as gate
from kernels.lora import triton_embedding, triton_expand, triton_pages, triton_segments, triton_shrink
from kernels.lora.launch import ExpandLaunch, ShrinkLaunch
from kernels.lora.segments import COUNTS
from tests.kernels.compiling import compile_for_h200, stack_bytes

FLOAT32 = ("h_ptr", "joined_ptr", "scaling_ptr", "values_ptr", "base_bias_ptr", "cos_ptr", "sin_ptr")
INT64 = ("token_ids_ptr", "dora_scale_ptr", "lora_bias_ptr", "positions_ptr", "kv_positions_ptr")
ROWS: tuple[str, ...] = (
    "x_ptr",
    "y_ptr",
    "out_ptr",
    "pages_ptr",
    "query_ptr",
    "key_ptr",
    "value_ptr",
    "query_weight_ptr",
)
ROWS += ("key_weight_ptr", "key_cache_ptr", "value_cache_ptr")
SIZES_OF_16: tuple[str, ...] = ("in_features", "stride_xt", "stride_yt", "stride_ht", "stride_table")
SIZES_OF_16 += ("stride_rt", "stride_qt", "stride_qh", "stride_kt", "stride_kh", "stride_vt", "stride_vh")
VECTORS = {"HAS_DORA_SCALE": True, "HAS_LORA_BIAS": True, "HAS_BASE_BIAS": True, "PAGE_VALUES": 4096}
# What an expand of a decode step in one plane has, in a launch of its own or in another kernel's.
EXPANDED: dict[str, Any] = {"BLOCK_R": triton_pages.EXPAND_RANKS, "ONE_STEP": True, "NUM_PLANES": 1, "H_ALIGN": 4}
EXPANDED |= VECTORS
PAGES = {"TILE_WIDTH": 1024, "PAGE_RANKS": 8}


def compile_kernel(
    kernel: Any,
    dtype: str,
    constants: dict[str, Any],
    num_stages: int,
    *,
    is_fused: bool,
    num_warps: int = 4,
    maxnreg: int | None = None,
) -> None:
    """With pointers of `dtype`, but for the indices and float32 tables."""
    types = dict.fromkeys(ROWS, f"*{dtype}") | dict.fromkeys(FLOAT32, "*fp32") | {"eps": "fp32"}
    types["weight_offset"] = "fp32"
    types |= dict.fromkeys(INT64, "*i64") | {"scaling": "fp32"}
    others = [name for name in kernel.arg_names if not name.endswith("_ptr") and name not in SIZES_OF_16]
    options: dict[str, Any] = {
        "num_stages": num_stages,
        "is_fused": is_fused,
        "num_warps": num_warps,
        "maxnreg": maxnreg,
    }
    compiled = compile_for_h200(kernel, constants, types, not_of_16=others, **options)
    ptx = compiled.asm["ptx"]
    line = {"kernel": kernel.__name__, "dtype": dtype, "shared_bytes": compiled.metadata.shared}
    line["mma_shapes"] = sorted(set(re.findall(r"mma\.sync\S*\.(m\d+n\d+k\d+)", ptx)))
    line["num_fused"] = len(re.findall(r"\bfma\.", ptx))
    line["num_shuffles"] = ptx.count("shfl.sync")
    line |= {"num_mma": ptx.count("mma.sync"), "num_wgmma": ptx.count("wgmma")}
    line |= {"num_single_loads": ptx.count("ld.global.b16"), "num_copies_of_16": ptx.count("cp.async.cg")}
    # Waits that leave the copies of a later step on their way.
    line["num_ahead"] = len(re.findall(r"cp\.async\.wait_group\s+[1-9]", ptx))
    line["stack_bytes"] = stack_bytes(compiled)
    if kernel is triton_shrink.shrink_kernel:
        # Steps of x [T, K] and A [R, K] that shared memory has room for.
        step_bytes = (constants["BLOCK_T"] + constants["BLOCK_R"]) * constants["BLOCK_K"] * 2
        line["num_buffers"] = compiled.metadata.shared // step_bytes
    # How the row of a sum lies in the program's threads, from which its order follows.
    text = compiled.asm["ttgir"]
    layouts = dict(re.findall(r"^(#\w+) = (.*)$", text, re.MULTILINE))
    line["summed"] = [f"{size} {layouts[name]}" for size, name in re.findall(r"\(tensor<(\w+), (#\w+)>\) -> f32", text)]
    print(json.dumps(line), flush=True)


def compile_shrink(tokens: int, ranks: int) -> None:
    """Of an 8B Llama's linears, in parts that are joined."""
    shrink = {"BLOCK_T": tokens, "BLOCK_R": ranks, "BLOCK_K": 128, "NUM_PARTS": 8, "PART_STEPS": 4, "HAS_PLANES": True}
    shrink |= {"IS_JOINED": True, "COUNTS": COUNTS, "stride_xk": 1} | PAGES
    stages = ShrinkLaunch.default(ranks, PAGES["TILE_WIDTH"], "bfloat16").num_stages
    compile_kernel(triton_shrink.shrink_kernel, "bf16", shrink, num_stages=stages, is_fused=True)


def compile_folded() -> None:
    """In the kernel that reads its rows: an 8B Llama's gate, with vectors, and with few registers without them."""
    warps, stages = gate.NUM_WARPS, gate.NUM_STAGES
    constants = {"WIDTH": 14336, "IS_JOINT": False, "ACTIVATION": "silu", "BLOCK_T": 16, "BLOCK_N": 128}
    constants |= {"RUNS": triton_pages.runs_of(128, warps, itemsize=2)} | EXPANDED | PAGES
    compile_kernel(gate.gate_expand_kernel, "bf16", constants, num_stages=stages, is_fused=False, num_warps=warps)
    constants |= dict.fromkeys(VECTORS, False) | {"BLOCK_R": triton_pages.LEAST_EXPAND_RANKS, "PAGE_VALUES": 1}
    few: dict[str, Any] = {"num_warps": warps, "maxnreg": gate.FEW_REGISTERS}
    compile_kernel(gate.gate_expand_kernel, "bf16", constants, num_stages=stages, is_fused=False, **few)


def main() -> None:
    compile_shrink(32, 64)
    compile_shrink(16, 16)
    expand = {"BLOCK_T": 32, "BLOCK_N": 128, "ADD_INPUTS": True, "stride_yn": 1} | EXPANDED | PAGES
    expand |= {"OUT_FEATURES": (4096, 1024, 1024), "NUM_MODULES": 3, "ALIGN": 16, "NUM_PLANES": 8}
    launch = ExpandLaunch.default(PAGES["TILE_WIDTH"])
    expand["RUNS"] = triton_pages.runs_of(expand["BLOCK_N"], launch.num_warps, itemsize=2)
    warps, stages = launch.num_warps, launch.num_stages
    compile_kernel(triton_expand.expand_kernel, "bf16", expand, num_stages=stages, is_fused=False, num_warps=warps)
    compile_folded()
    embed = {"BLOCK_T": 16, "BLOCK_R": 16} | PAGES
    compile_kernel(triton_embedding.embed_kernel, "bf16", embed, num_stages=3, is_fused=True)
    route = {"BLOCK": 1024}
    compile_kernel(triton_segments.count_kernel, "i32", route, num_stages=3, is_fused=True)
    route |= {"SLOTS": 256, "COUNTS": COUNTS}
    compile_kernel(triton_segments.place_kernel, "i32", route, num_stages=3, is_fused=True)


if __name__ == "__main__":
    main()
