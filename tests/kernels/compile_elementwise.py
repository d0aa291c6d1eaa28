"""Compiles the kernels of norm, gate, rotation, FP8 rows and products of one row for an H200, which needs no GPU.

Prints a line of JSON for each.

Run by its test in a process of its own, since triton either interprets or compiles.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import triton
import triton.language as tl

from kernels.fp8 import MIN_SCALE
from kernels.fp8_rows.triton_kernel import num_warps_for, quantize_rows_kernel
from kernels.gated_activation.triton_kernel import BLOCK, gated_activation_fp8_kernel, gated_activation_kernel
from kernels.linear.triton_row import NARROW_TILE, NUM_WARPS, WIDE_TILE, row_linear_kernel
from kernels.rms_norm.triton_kernel import rms_norm_kernel
from kernels.rope.triton_kernel import BLOCK_HEADS, rope_kernel
from kernels.row_state.triton_kernel import (
    BLOCK as ROWS,
    decode_inputs_kernel,
    store_differences_kernel,
    store_tokens_kernel,
)
from kernels.swap_blocks.triton_kernel import CHUNK, swap_blocks_kernel
from kernels.token_rows.triton_kernel import embeddings_kernel, logits_kernel
from tests.kernels.compiling import compile_for_h200, stack_bytes


def compile_kernel(kernel: Any, constants: Mapping[str, Any], kinds: Mapping[str, str], num_warps: int) -> None:
    """With bfloat16 tensors, but for those in `kinds`."""
    types = {name: "*bf16" for name in kernel.arg_names if name.endswith("_ptr")} | dict(kinds)
    compiled = compile_for_h200(kernel, constants, types, num_warps=num_warps)
    text = compiled.asm["ptx"]
    figures = {
        "kernel": kernel.__name__,
        "num_vectors": sum(text.count(width) for width in (".v4.b32", ".v2.b32", ".v2.b64")),
        "num_fp8_casts": text.count("e4m3x2.f32"),
        "stack_bytes": stack_bytes(compiled),
    }
    print(json.dumps(figures))


def compile_rope(dim: int, rotary_dim: int, *, has_norm: bool, has_positions: bool) -> None:
    """32 heads over 8 of keys, tables in float32."""
    half = rotary_dim // 2
    constants = {
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
    kinds = {"positions_ptr": "*i64", "kv_positions_ptr": "*i64", "cos_ptr": "*fp32", "sin_ptr": "*fp32"}
    compile_kernel(rope_kernel, constants, kinds | {"eps": "fp32", "weight_offset": "fp32"}, 1)


FP8_ROWS = {"codes_ptr": "*fp8e4nv", "scales_ptr": "*fp32"}


def compile_norm(hidden: int, *, has_residual: bool, has_codes: bool) -> None:
    constants = {"HIDDEN": hidden, "BLOCK_H": triton.next_power_of_2(hidden), "HAS_RESIDUAL": has_residual}
    constants |= {"HAS_CODES": has_codes, "MIN_SCALE": MIN_SCALE}
    kinds = {"eps": "fp32", "weight_offset": "fp32", **FP8_ROWS}
    compile_kernel(rms_norm_kernel, constants, kinds, num_warps_for(constants["BLOCK_H"]))


def compile_fp8_rows(width: int) -> None:
    """The rows alone, and those of a gate."""
    block = triton.next_power_of_2(width)
    constants = {"WIDTH": width, "BLOCK": block, "MIN_SCALE": MIN_SCALE}
    compile_kernel(quantize_rows_kernel, constants, FP8_ROWS, num_warps_for(block))
    gate = constants | {"ACTIVATION": "silu", "HAS_VALUES": True}
    compile_kernel(gated_activation_fp8_kernel, gate, FP8_ROWS, num_warps_for(block))


def compile_token_rows() -> None:
    """Rows of 4096 values in pages of 1024 columns."""
    tables = dict.fromkeys(("ids_ptr", "bias_ptr", "token_ids_ptr"), "*i64")
    tables |= dict.fromkeys(("token_slots_ptr", "row_slots_ptr", "page_ids_ptr", "first_ptr", "count_ptr"), "*i32")
    tables |= {"values_ptr": "*fp32", "h_ptr": "*fp32", "multiplier": "fp32"}
    pages = {"BLOCK": 1024, "PAGE_VALUES": 4096}
    compile_kernel(embeddings_kernel, pages | {"TILE_WIDTH": 1024, "PAGE_RANKS": 8}, tables, 4)
    compile_kernel(logits_kernel, pages | {"NUM_PLANES": 2}, tables, 4)


def compile_row_state() -> None:
    longs = dict.fromkeys(("longs_ptr", "last_tokens_ptr", "tokens_ptr"), "*i64")
    names = "context_lens token_slots rows num_computed num_prompt slots tables ahead draft_ids whole differences"
    ints = {f"{name}_ptr": "*i32" for name in names.split()}
    compile_kernel(decode_inputs_kernel, {"BLOCK_SIZE": 16, "BLOCK": ROWS}, longs | ints, 4)
    compile_kernel(store_tokens_kernel, {"BLOCK": ROWS}, longs | ints, 4)
    compile_kernel(store_differences_kernel, {"BLOCK": ROWS}, ints, 4)


def compile_row_linear(num_in: int, tile: tuple[int, int], *, has_bias: bool) -> None:
    constants = {"NUM_IN": num_in, "BLOCK_OUT": tile[0], "BLOCK_IN": tile[1], "HAS_BIAS": has_bias}
    compile_kernel(row_linear_kernel, constants, {}, NUM_WARPS)


if __name__ == "__main__":
    compile_row_linear(4096, NARROW_TILE, has_bias=True)
    compile_row_linear(14336, WIDE_TILE, has_bias=False)
    compile_token_rows()
    compile_row_state()
    compile_rope(128, 128, has_norm=False, has_positions=True)
    compile_rope(80, 32, has_norm=True, has_positions=False)
    compile_norm(4096, has_residual=True, has_codes=False)
    compile_norm(4096, has_residual=True, has_codes=True)
    compile_fp8_rows(14336)
    compile_kernel(gated_activation_kernel, {"WIDTH": 14336, "BLOCK": BLOCK, "ACTIVATION": "silu"}, {}, 4)
    tables = {"caches_ptr": "*i64", "pairs_ptr": "*i64"}
    constants = {"WORD": tl.int64, "CHUNK": CHUNK, "PAIRED": True}
    for is_out in (True, False):
        compile_kernel(swap_blocks_kernel, constants | {"IS_OUT": is_out}, tables, 4)
