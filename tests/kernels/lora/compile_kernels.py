"""Compiles the LoRA kernels for an H200, which needs no GPU. Prints a line of JSON for each; run by its test.

A process of its own, since triton either interprets or compiles.
"""

from __future__ import annotations

import json
import re
from typing import Any

from kernels.lora import triton_embedding, triton_expand, triton_segments, triton_shrink
from kernels.lora.launch import ShrinkLaunch
from kernels.lora.segments import COUNTS
from tests.kernels.compiling import compile_for_h200

FLOAT32 = ("h_ptr", "joined_ptr", "scaling_ptr", "values_ptr", "base_bias_ptr")
INT64 = ("token_ids_ptr", "dora_scale_ptr", "lora_bias_ptr")
SIZES_OF_16 = ("in_features", "stride_xt", "stride_yt", "stride_ht", "stride_table")
# Of a shrink's step in main: bfloat16 x [32, 128] and A [64, 128].
STEP_BYTES = (32 + 64) * 128 * 2


def compile_kernel(kernel: Any, dtype: str, constants: dict[str, Any], num_stages: int) -> None:
    """With pointers of `dtype`, but for the indices and float32 tables."""
    types = dict.fromkeys(("x_ptr", "y_ptr", "pages_ptr"), f"*{dtype}") | dict.fromkeys(FLOAT32, "*fp32")
    types |= dict.fromkeys(INT64, "*i64") | {"scaling": "fp32"}
    others = [name for name in kernel.arg_names if not name.endswith("_ptr") and name not in SIZES_OF_16]
    compiled = compile_for_h200(kernel, constants, types, not_of_16=others, num_stages=num_stages)
    ptx = compiled.asm["ptx"]
    line = {"kernel": kernel.__name__, "dtype": dtype, "shared_bytes": compiled.metadata.shared}
    line |= {"num_mma": ptx.count("mma.sync"), "num_wgmma": ptx.count("wgmma")}
    line |= {"num_single_loads": ptx.count("ld.global.b16"), "num_copies_of_16": ptx.count("cp.async.cg")}
    # Waits that leave the copies of a later step on their way.
    line["num_ahead"] = len(re.findall(r"cp\.async\.wait_group\s+[1-9]", ptx))
    line["num_buffers"] = compiled.metadata.shared // STEP_BYTES if kernel is triton_shrink.shrink_kernel else 0
    print(json.dumps(line), flush=True)


def main() -> None:
    shared = {"BLOCK_T": 32, "TILE_WIDTH": 1024, "PAGE_RANKS": 8}
    shrink = {"BLOCK_R": 64, "BLOCK_K": 128, "NUM_PARTS": 8, "PART_STEPS": 4, "HAS_PLANES": True, "stride_xk": 1}
    shrink |= {"IS_JOINED": True, "COUNTS": COUNTS}
    stages = ShrinkLaunch.default(64, 1024, "bfloat16").num_stages
    compile_kernel(triton_shrink.shrink_kernel, "bf16", shrink | shared, num_stages=stages)
    expand: dict[str, Any] = {
        "BLOCK_R": 32,
        "BLOCK_N": 128,
        "NUM_PLANES": 8,
        "H_ALIGN": 4,
        "ADD_INPUTS": True,
        "stride_yn": 1,
    }
    expand |= {"HAS_DORA_SCALE": True, "HAS_LORA_BIAS": True, "HAS_BASE_BIAS": True, "PAGE_VALUES": 4096}
    expand |= {"OUT_FEATURES": (4096, 1024, 1024), "NUM_MODULES": 3, "ALIGN": 16}
    compile_kernel(triton_expand.expand_kernel, "bf16", expand | shared, num_stages=1)
    embed = {"BLOCK_T": 16, "BLOCK_R": 16, "TILE_WIDTH": 1024, "PAGE_RANKS": 8}
    compile_kernel(triton_embedding.embed_kernel, "bf16", embed, num_stages=3)
    compile_kernel(triton_segments.count_kernel, "i32", {"BLOCK": 1024}, num_stages=3)
    compile_kernel(triton_segments.place_kernel, "i32", {"BLOCK": 1024, "SLOTS": 256, "COUNTS": COUNTS}, num_stages=3)


if __name__ == "__main__":
    main()
