"""Compiles the product of a few rows for an H200, which needs no GPU. Prints a line of JSON for each number of rows.

A process of its own, since triton either interprets or compiles.
"""

from __future__ import annotations

import json
import re

import torch

from kernels.linear.rows_launch import RowsLaunch, Sizes, grid_of
from kernels.linear.triton_rows import rows_linear_kernel
from tests.kernels.compiling import compile_for_h200, num_unwaited, stack_bytes

TYPES = {"parts_ptr": "*fp32"}
UNALIGNED = ("num_rows",)


def compile_rows(num_rows: int, num_in: int, num_out: int, dtype: torch.dtype, *, has_bias: bool) -> None:
    launch = RowsLaunch.default(Sizes(str(dtype).removeprefix("torch."), num_in, num_out))
    grid = grid_of(launch, 132, dtype, num_in, num_out, num_rows)
    values = "*bf16" if dtype == torch.bfloat16 else "*fp16"
    constants = {
        "BLOCK_ROWS": grid.block_rows,
        "BLOCK_OUT": launch.block_out,
        "BLOCK_IN": launch.block_in,
        "NUM_PARTS": grid.num_parts,
        "IS_EVEN": num_in % launch.block_in == 0,
        "HAS_BIAS": has_bias,
    }
    types = dict.fromkeys(("y_ptr", "x_ptr", "weight_ptr", "bias_ptr"), values) | TYPES
    compiled = compile_for_h200(
        rows_linear_kernel,
        constants,
        types,
        not_of_16=UNALIGNED,
        num_warps=grid.num_warps,
        num_stages=grid.num_stages,
    )
    ptx = compiled.asm["ptx"]
    line = {
        "num_rows": num_rows,
        "shapes": sorted(set(re.findall(r"wgmma\.mma_async\S*\.(m\d+n\d+k\d+)", ptx))),
        # Of the most programs of a multiprocessor.
        "shared_bytes": launch.programs * compiled.metadata.shared,
        "num_unwaited": num_unwaited(compiled),
        "copy_bytes": sorted(set(re.findall(r"cp\.async\.c[ag]\S* [^;]*?, (0x\w+|\d+),", ptx))),
        "num_waits_ahead": len(re.findall(r"cp\.async\.wait_group\s+[2-9]", ptx)),
        "stack_bytes": stack_bytes(compiled),
    }
    print(json.dumps(line))


if __name__ == "__main__":
    for num_rows in (2, 32, 64):
        compile_rows(num_rows, 4096, 28672, torch.bfloat16, has_bias=num_rows == 2)
    compile_rows(64, 14336 + 16, 4096, torch.float16, has_bias=True)
    compile_rows(16, 4096, 4096, torch.bfloat16, has_bias=False)
