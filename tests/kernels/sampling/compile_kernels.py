"""Compiles the sampling kernels for an H200, which needs no GPU. Prints a line of JSON for each; run by its test.

A process of its own, since triton either interprets or compiles.
"""

from __future__ import annotations

import json
from typing import Any

from kernels.sampling import triton_adjust, triton_kernel, triton_logprobs, triton_search
from kernels.sampling.launch import SampleLaunch
from tests.kernels.compiling import compile_for_h200

# Element types of pointers, by argument; the others are the logits'.
POINTERS = {
    "i64": "sums above limited top_k seed position rows history_row bias_row bias_token token_ids rank tokens",
    "i32": "source lowest prefix best_id history num_bad",
    "fp64": "best",
    "u8": "is_finite",
    "fp32": "highest value adjusted temperature top_p min_p repetition presence frequency bias normaliser",
}
TYPE_OF = {f"{name}_ptr": dtype for dtype, names in POINTERS.items() for name in names.split()}


def compile_kernel(kernel: Any, constants: dict[str, Any], num_warps: int = 4, *, has_adjusted: bool = True) -> None:
    """With logits in bfloat16. Without adjusted logits, as in most steps, the logits stand in their place."""
    types = {name: "*" + TYPE_OF.get(name, "bf16") for name in kernel.arg_names if name.endswith("_ptr")}
    if not has_adjusted and "adjusted_ptr" in types:
        types["adjusted_ptr"] = types["logits_ptr"]
    others = [name for name in kernel.arg_names if name not in types]
    compiled = compile_for_h200(kernel, constants, types, not_of_16=others, num_warps=num_warps, is_fused=False)
    ptx = compiled.asm["ptx"]
    line = {
        "kernel": kernel.__name__,
        "constants": constants | {"has_adjusted": has_adjusted},
        "shared_bytes": compiled.metadata.shared,
        "num_local": ptx.count(".local"),
        "num_fused": ptx.count("fma.rn.f32"),
    }
    print(json.dumps(line), flush=True)


def main() -> None:
    launch = SampleLaunch()
    sizes = {"PARTS": 16, "PART": launch.part, "TILE": launch.tile}
    for of_mass in (False, True):
        for is_first in (False, True):
            options = {"IS_FIRST": is_first, "OF_MASS": of_mass, "stride_lv": 1}
            for has_adjusted in (False, True):
                compile_kernel(
                    triton_search.digit_kernel,
                    options | sizes,
                    num_warps=launch.search_warps,
                    has_adjusted=has_adjusted,
                )
        compile_kernel(triton_search.lowest_kernel, {"LAST_PASS": 7, "OF_MASS": of_mass, "PARTS": 16})
    one_pass = {"stride_lv": 1, "PART": launch.part, "TILE": launch.tile}
    for has_adjusted in (False, True):
        for has_min_p in (False, True):
            options = {"HAS_MIN_P": has_min_p, "stride_lv": 1}
            compile_kernel(triton_kernel.draw_kernel, options | sizes, has_adjusted=has_adjusted)
        for has_rows, has_limits in ((False, False), (True, False), (True, True)):
            options = {"HAS_ADJUSTED": has_adjusted, "HAS_ROWS": has_rows, "HAS_LIMITS": has_limits}
            compile_kernel(triton_kernel.best_kernel, one_pass | options, has_adjusted=has_adjusted)
    for has_rows, has_limits in ((False, False), (True, False), (True, True)):
        compile_kernel(triton_kernel.pick_kernel, {"PARTS": 16, "HAS_ROWS": has_rows, "HAS_LIMITS": has_limits})
    compile_kernel(triton_adjust.penalise_kernel, {"BLOCK": triton_adjust.BLOCK, "stride_lv": 1})
    compile_kernel(triton_adjust.bias_kernel, {"BLOCK": triton_adjust.BLOCK_BIASES})
    compile_kernel(triton_logprobs.normalise_kernel, {"BLOCK": triton_logprobs.BLOCK, "stride_lv": 1}, num_warps=8)


if __name__ == "__main__":
    main()
