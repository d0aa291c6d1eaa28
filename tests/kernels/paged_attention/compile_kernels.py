"""Compiles the attention kernels for an H200. Prints a line of JSON for each; run by its test as another process."""

from __future__ import annotations

import json
import re
from typing import Any

import triton

from kernels.paged_attention.launch import DecodeLaunch, PrefillLaunch, Sizes
from kernels.paged_attention.triton_decode import JOINED, decode_kernel
from kernels.paged_attention.triton_prefill import prefill_kernel
from kernels.paged_attention.triton_work import BLOCK, list_kernel
from tests.kernels.compiling import compile_for_h200, num_unwaited, stack_bytes

AS_QUERY = ("out_ptr", "query_ptr", "sinks_ptr", "slopes_ptr")
FLOAT32 = ("part_ptr", "part_sum_ptr", "key_scale_ptr", "value_scale_ptr")
NAMES = {"bf16": "bfloat16", "fp32": "float32", "fp8e4nv": "float8_e4m3fn"}
SCALARS = ("score_scale", "softcap", "value_scale")
NOT_OF_16 = ("stride_table", "stride_sp", "window", "num_seqs", "num_parts")


def compile_kernel(
    kernel: Any, constants: dict[str, Any], dtype: str, cache: str, *, num_warps: int, num_stages: int
) -> None:
    """With queries whose strides are multiples of 16."""
    types = dict.fromkeys(AS_QUERY, f"*{dtype}") | dict.fromkeys(FLOAT32, "*fp32") | dict.fromkeys(SCALARS, "fp32")
    types |= dict.fromkeys(("key_cache_ptr", "value_cache_ptr"), f"*{cache}")
    compiled = compile_for_h200(
        kernel,
        {name: value for name, value in constants.items() if name in kernel.arg_names},
        types,
        not_of_16=NOT_OF_16,
        num_warps=num_warps,
        num_stages=num_stages,
    )
    text = compiled.asm["ptx"]
    figures = {
        "kernel": kernel.__name__,
        "dtype": dtype,
        "cache": cache,
        "num_stages": num_stages,
        "num_wgmma": text.count("wgmma.mma_async"),
        "num_mma": text.count("mma.sync"),
        # Waits that leave the copies of a later tile on their way.
        "num_ahead": len(re.findall(r"cp\.async\.wait_group\s+[1-9]", text)),
        "num_fp8_casts": text.count("e4m3x2"),
        "shared_bytes": compiled.metadata.shared,
        "stack_bytes": stack_bytes(compiled),
        "num_unwaited": num_unwaited(compiled) if "wgmma" in text else 0,
    }
    print(json.dumps(figures), flush=True)


def compile_all(
    group: int,
    dim: int,
    block_size: int,
    *,
    dtype: str = "bf16",
    cache: str = "bf16",
    has_list: bool = False,
    **options: Any,
) -> None:
    """The kernels of one model, that of the work list if has_list; options are the kernels' that are not off."""
    block_d = triton.next_power_of_2(dim)
    sizes = Sizes(NAMES[dtype], NAMES[cache], dim, group)
    decode, prefill = DecodeLaunch.default(sizes), PrefillLaunch.default(sizes)
    constants: dict[str, Any] = {
        "GROUP": group,
        "KEY_DIM": dim,
        "VALUE_DIM": dim,
        "BLOCK_D": block_d,
        "BLOCK_DV": block_d,
        "BLOCK_SIZE": block_size,
        "HEAD_TILES": 1,
        "TILES": 8,
        "SPLIT_KEYS": decode.split_keys,
        "SPLITS": decode.max_splits,
        "UNITS": decode.units,
        "ROWS": triton.next_power_of_2(min(group, decode.block_m)),
        "JOINED": JOINED,
        "stride_qd": 1,
        "IS_CAUSAL": True,
        "SPARSE_BLOCK": 0,
        "LOCAL_BLOCKS": 1,
        "VERTICAL_STRIDE": 1,
        "HEAD_STEP": 0,
    }
    constants |= {f"HAS_{name}": False for name in ("WINDOW", "SINKS", "SOFTCAP", "SLOPES", "TOKEN_SCALES")}
    constants |= options
    if constants["SPARSE_BLOCK"] > 0:
        constants["UNITS"] = 1  # as run_decode
    tiles = constants | {"BLOCK_M": decode.block_m, "BLOCK_N": decode.block_n, "HEADS": min(group, decode.block_m)}
    compile_kernel(decode_kernel, tiles, dtype, cache, num_warps=decode.num_warps, num_stages=decode.num_stages)
    if has_list:
        listed = tiles | {"SPLITS_BLOCK": decode.max_splits, "TILES_BLOCK": tiles["TILES"], "BLOCK": BLOCK}
        compile_kernel(list_kernel, listed, dtype, cache, num_warps=4, num_stages=1)
    tiles |= {"BLOCK_M": prefill.block_m, "BLOCK_N": prefill.block_n, "QUERIES": prefill.block_m // group}
    compile_kernel(prefill_kernel, tiles, dtype, cache, num_warps=prefill.num_warps, num_stages=prefill.num_stages)


def main() -> None:
    compile_all(4, 128, 16, has_list=True)
    compile_all(7, 80, 24, HAS_WINDOW=True, HAS_SINKS=True, HAS_SOFTCAP=True, HAS_SLOPES=True, has_list=True)
    compile_all(4, 128, 16, cache="fp8e4nv", IS_CAUSAL=False)
    sparse: dict[str, Any] = {"SPARSE_BLOCK": 64, "LOCAL_BLOCKS": 16, "VERTICAL_STRIDE": 8, "HEAD_STEP": -1}
    compile_all(4, 128, 16, cache="fp8e4nv", HAS_TOKEN_SCALES=True, **sparse)
    compile_all(2, 256, 16, HAS_WINDOW=True, HAS_SOFTCAP=True)
    compile_all(4, 128, 16, dtype="fp32", cache="fp32")
    compile_all(2, 256, 16, dtype="fp32", cache="fp32")
    compile_all(2, 64, 16, dtype="fp32", cache="fp8e4nv", HAS_TOKEN_SCALES=True)
    compile_all(2, 256, 16, dtype="fp32", cache="fp8e4nv")


if __name__ == "__main__":
    main()
