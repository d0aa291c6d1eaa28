"""The product of one row with a linear's weight on the GPU: a program reads one or two rows of the weight, once.

Where one request decodes, the bytes of the weights decide the time of a step.
"""

from __future__ import annotations

import torch
import triton.language as tl

from kernels.buckets import ceil_div, round_up
from kernels.triton_launch import Prepared, kernel, prepare, prepares

NARROW_INPUT = 8192
# (outputs of a program, inputs of a tile), measured on an H100 for 4096 and 14336 inputs, cold weights in bfloat16.
NARROW_TILE, WIDE_TILE = (1, 2048), (2, 1024)
NUM_WARPS = 4


@kernel
def row_linear_kernel(
    # pointers
    y_ptr,  # [out]
    x_ptr,  # [in]
    weight_ptr,  # [out, in]
    bias_ptr,  # [out], read if HAS_BIAS
    # sizes
    num_out,
    # strides
    stride_wo,
    # sizes and options
    NUM_IN: tl.constexpr,
    BLOCK_OUT: tl.constexpr,
    BLOCK_IN: tl.constexpr,
    HAS_BIAS: tl.constexpr,
):
    """y [o] = sum over i of weight [o, i] * x [i], plus bias [o]. Grid: (chunks of out,).

    Products and sums are float32 and rounded once, behind the bias. A place of the tile sums every BLOCK_IN-th input.
    """
    rows = tl.program_id(0) * BLOCK_OUT + tl.arange(0, BLOCK_OUT)
    is_row = rows < num_out
    # Rows past the last are read as the last, so that full tiles need no mask.
    weight_rows = weight_ptr + tl.minimum(rows, num_out - 1).to(tl.int64)[:, None] * stride_wo
    offs = tl.arange(0, BLOCK_IN)
    total = tl.zeros((BLOCK_OUT, BLOCK_IN), tl.float32)
    for begin in range(0, NUM_IN // BLOCK_IN * BLOCK_IN, BLOCK_IN):
        x = tl.load(x_ptr + begin + offs).to(tl.float32)
        total += tl.load(weight_rows + (begin + offs)[None, :]).to(tl.float32) * x[None, :]
    if NUM_IN % BLOCK_IN != 0:
        last = NUM_IN // BLOCK_IN * BLOCK_IN + offs
        is_inside = last < NUM_IN
        x = tl.load(x_ptr + last, mask=is_inside, other=0.0).to(tl.float32)
        weight = tl.load(weight_rows + last[None, :], mask=is_inside[None, :], other=0.0).to(tl.float32)
        total += weight * x[None, :]
    y = tl.sum(total, axis=1)
    if HAS_BIAS:
        y += tl.load(bias_ptr + rows, mask=is_row, other=0.0).to(tl.float32)
    tl.store(y_ptr + rows, y.to(y_ptr.dtype.element_ty), mask=is_row)


def row_linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """See the package."""
    num_out, num_in = weight.shape
    y = x.new_empty(1, num_out)
    if num_out == 0:
        return y
    launch = _prepare(num_out, num_in, weight.stride(0), bias is not None)
    launch(y, x, weight, y if bias is None else bias)
    return y


@prepares
def _prepare(num_out: int, num_in: int, stride_wo: int, has_bias: bool) -> Prepared:
    block_out, block_in = NARROW_TILE if num_in <= NARROW_INPUT else WIDE_TILE
    numbers = {
        "num_out": num_out,
        "stride_wo": stride_wo,
        "NUM_IN": num_in,
        "BLOCK_OUT": block_out,
        "BLOCK_IN": min(round_up(num_in), block_in),
        "HAS_BIAS": has_bias,
        "num_warps": NUM_WARPS,
    }
    return prepare(row_linear_kernel, (ceil_div(num_out, block_out),), numbers)
