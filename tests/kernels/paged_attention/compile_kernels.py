"""Compiles the attention kernels for an H200, which needs no GPU. Prints a line of JSON for each; run by its test.

A process of its own, since triton either interprets or compiles.
"""

from __future__ import annotations

import json
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from kernels.paged_attention import triton_kernel
from kernels.paged_attention.triton_kernel import Tiles, decode_tiles, prefill_tiles

H200 = GPUTarget("cuda", 90, 32)
TENSORS = ("out_ptr", "query_ptr", "key_cache_ptr", "value_cache_ptr", "sinks_ptr", "slopes_ptr")
NOT_OF_16 = ("stride_table", "stride_qd", "num_parts", "window")


def compile_kernel(kernel: Any, constants: dict[str, Any], tiles: Tiles) -> None:
    """With bfloat16 tensors whose strides are multiples of 16."""
    signature: dict[str, str] = {}
    for name in kernel.arg_names:
        if name in constants:
            signature[name] = "constexpr"
        elif name in TENSORS:
            signature[name] = "*bf16"
        elif name in ("part_ptr", "part_sum_ptr"):
            signature[name] = "*fp32"
        elif name.endswith("_ptr"):
            signature[name] = "*i32"
        else:
            signature[name] = "fp32" if name in ("score_scale", "softcap") else "i32"
    position = {name: index for index, name in enumerate(kernel.arg_names)}
    aligned = [name for name, kind in signature.items() if kind[0] in "*i" and name not in NOT_OF_16]
    source = ASTSource(
        fn=kernel,
        signature=signature,
        constexprs={(position[name],): value for name, value in constants.items()},
        attrs={(position[name],): [["tt.divisibility", 16]] for name in aligned},
    )
    compiled = triton.compile(
        source, target=H200, options={"num_warps": tiles.num_warps, "num_stages": tiles.num_stages}
    )
    text = compiled.asm["ptx"]
    figures = {
        "kernel": kernel.__name__,
        "num_wgmma": text.count("wgmma.mma_async"),
        "num_mma": text.count("mma.sync"),
        "num_async_copies": text.count("cp.async"),
        "shared_bytes": compiled.metadata.shared,
    }
    print(json.dumps(figures))


def compile_all(group: int, dim: int, block_size: int, *, has_options: bool) -> None:
    """The three kernels of one model."""
    block_d = triton.next_power_of_2(dim)
    splits = {
        "VALUE_DIM": dim,
        "BLOCK_DV": block_d,
        "HAS_WINDOW": has_options,
        "HAS_SINKS": has_options,
        "SPLIT_KEYS": triton_kernel.SPLIT_KEYS,
        "SPLITS": triton_kernel.MAX_SPLITS,
    }
    common = {
        "GROUP": group,
        "HEAD_TILES": 1,
        "KEY_DIM": dim,
        "BLOCK_D": block_d,
        "BLOCK_SIZE": block_size,
        "HAS_SOFTCAP": has_options,
        "HAS_SLOPES": has_options,
        "stride_qd": 1,
    }
    tiles = decode_tiles(group, dim, 2)
    sizes = {"BLOCK_M": tiles.block_m, "BLOCK_N": tiles.block_n}
    compile_kernel(triton_kernel._decode_kernel, {**splits, **common, **sizes}, tiles)
    compile_kernel(triton_kernel._combine_kernel, {**splits, "BLOCK_N": tiles.block_n}, Tiles(0, 0, 1, 1))
    tiles = prefill_tiles(dim, 2)
    sizes = {"BLOCK_M": tiles.block_m, "BLOCK_N": tiles.block_n, "HEADS": group, "QUERIES": tiles.block_m // group}
    options = {name: value for name, value in splits.items() if not name.startswith("SPLIT")}
    compile_kernel(triton_kernel._prefill_kernel, {**options, **common, **sizes}, tiles)


if __name__ == "__main__":
    compile_all(4, 128, 16, has_options=False)
    compile_all(7, 80, 24, has_options=True)
