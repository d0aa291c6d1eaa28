"""Compiles store_kv's kernels for an H200. Prints a line of JSON for each; run by its test in a process of its own."""

from __future__ import annotations

import json

from kernels.fp8 import MIN_SCALE
from kernels.store_kv import triton_kernel
from tests.kernels.compiling import compile_for_h200

TOKENS = {"key_ptr": "*bf16", "value_ptr": "*bf16", "kv_positions_ptr": "*i64"}
SCALES = {"inverse_key_scale": "fp32", "inverse_value_scale": "fp32", "key_scale_ptr": "*fp32"}
SIZES = {"KEY_DIM": 128, "VALUE_DIM": 128, "stride_kd": 1, "stride_vd": 1, "stride_kv_position": 1}


def main() -> None:
    for cache in ("bf16", "fp8e4nv"):
        types = {**TOKENS, **SCALES, "key_cache_ptr": f"*{cache}", "value_cache_ptr": f"*{cache}"}
        types["value_scale_ptr"] = "*fp32"
        chunk = {"NUM_HEADS": 8, "CHUNK": 1024, "IS_FP8": cache != "bf16"}
        compiled = [compile_for_h200(triton_kernel.store_kv_kernel, SIZES | chunk, types)]
        if cache != "bf16":
            head = {"MIN_SCALE": MIN_SCALE, "BLOCK_D": 128, "BLOCK_DV": 128}
            compiled.append(compile_for_h200(triton_kernel.store_scaled_kernel, SIZES | head, types, num_warps=1))
        for kernel in compiled:
            ptx = kernel.asm["ptx"]
            print(json.dumps({"cache": cache, "num_fp8_casts": ptx.count("satfinite.e4m3x2")}))


if __name__ == "__main__":
    main()
