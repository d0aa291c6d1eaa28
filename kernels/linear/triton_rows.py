"""The product of a few rows with a linear's weight on the GPU: every value of the weight is read once.

Several programs share a tile of outputs, each for a range of the inputs; the one that ends last adds their sums in the
order of the inputs. A row's bits are the same beside any other rows, and in tiles of any number of rows: a tensor core
sums the products of 16 inputs at a time, in order, whatever the tile's other sizes are.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.runtime import driver

from kernels.devices import device_name, num_multiprocessors
from kernels.linear.counters import zero_counters
from kernels.linear.rows_launch import RowsGrid, RowsLaunch, grid_of, launch_of
from kernels.triton_launch import Prepared, kernel, prepare, prepares


@triton.jit
def _joined(acc, parts_ptr, in_part, part, NUM_PARTS: tl.constexpr, PART_VALUES: tl.constexpr):
    """The sum of all parts of a tile, in order, for the program that has computed `part`.

    Other programs wrote them: they are read from where all multiprocessors see them.
    """
    if NUM_PARTS == 2:
        return acc + tl.load(parts_ptr + (1 - part) * PART_VALUES + in_part, cache_modifier=".cg")
    acc = tl.load(parts_ptr + in_part, cache_modifier=".cg")
    for other in tl.static_range(1, NUM_PARTS):
        acc += tl.load(parts_ptr + other * PART_VALUES + in_part, cache_modifier=".cg")
    return acc


@kernel(do_not_specialize=["num_rows"])
def rows_linear_kernel(
    # pointers
    y_ptr,  # [rows, out]
    parts_ptr,  # float32 [tiles, NUM_PARTS, BLOCK_OUT * BLOCK_ROWS], of several parts
    num_done_ptr,  # int32 [tiles], zeros before and after
    x_ptr,  # [rows, in]
    weight_ptr,  # [out, in]
    bias_ptr,  # [out], read if HAS_BIAS
    # sizes
    num_rows,
    num_out,
    num_in,
    # strides
    stride_xt,
    stride_wo,
    # sizes and options
    BLOCK_ROWS: tl.constexpr,
    BLOCK_OUT: tl.constexpr,
    BLOCK_IN: tl.constexpr,
    NUM_PARTS: tl.constexpr,
    IS_EVEN: tl.constexpr,  # the inputs are a multiple of BLOCK_IN
    HAS_BIAS: tl.constexpr,
):
    """y [t, o] = sum over i of x [t, i] * weight [o, i], plus bias [o]; sums are float32 and rounded once.

    Grid: (tiles of outputs, NUM_PARTS). A tensor core product has at least 64 rows: outputs, or the rows of x where a
    tile has fewer outputs. Both operands lie in shared memory: ptxas before 13.3 may break products with one in
    registers (kernels/lora/triton_pages.py).
    """
    tile = tl.program_id(0)
    part = tl.program_id(1)
    num_steps = tl.cdiv(num_in, BLOCK_IN)
    begin = part * num_steps // NUM_PARTS
    end = (part + 1) * num_steps // NUM_PARTS
    offs_t = tl.arange(0, BLOCK_ROWS)
    offs_i = tl.arange(0, BLOCK_IN)
    offs_o = tile * BLOCK_OUT + tl.arange(0, BLOCK_OUT)
    is_row = offs_t < num_rows
    is_out = offs_o < num_out
    x_rows = x_ptr + offs_t.to(tl.int64)[:, None] * stride_xt + offs_i[None, :]
    # Outputs past the last are read as the last, so that full tiles need no mask.
    weight_rows = weight_ptr + tl.minimum(offs_o, num_out - 1).to(tl.int64)[:, None] * stride_wo + offs_i[None, :]
    OUTPUTS_FIRST: tl.constexpr = BLOCK_OUT >= 64
    if OUTPUTS_FIRST:
        acc = tl.zeros((BLOCK_OUT, BLOCK_ROWS), tl.float32)
    else:
        acc = tl.zeros((BLOCK_ROWS, BLOCK_OUT), tl.float32)
    for step in range(begin, end):
        column = step * BLOCK_IN
        if IS_EVEN:
            x = tl.load(x_rows + column, mask=is_row[:, None], other=0.0)
            weight = tl.load(weight_rows + column)
        else:
            is_in = (column + offs_i < num_in)[None, :]
            x = tl.load(x_rows + column, mask=is_row[:, None] & is_in, other=0.0)
            weight = tl.load(weight_rows + column, mask=is_in, other=0.0)
        if OUTPUTS_FIRST:
            acc = tl.dot(weight, tl.trans(x), acc, input_precision="ieee")
        else:
            acc = tl.dot(x, tl.trans(weight), acc, input_precision="ieee")
    is_last = True
    if NUM_PARTS > 1:
        PART_VALUES: tl.constexpr = BLOCK_OUT * BLOCK_ROWS
        if OUTPUTS_FIRST:
            in_part = tl.arange(0, BLOCK_OUT)[:, None] * BLOCK_ROWS + offs_t[None, :]
        else:
            in_part = offs_t[:, None] * BLOCK_OUT + tl.arange(0, BLOCK_OUT)[None, :]
        tile_ptr = parts_ptr + tile.to(tl.int64) * (NUM_PARTS * PART_VALUES)
        tl.store(tile_ptr + part * PART_VALUES + in_part, acc)
        # All threads have stored their values before one of them says so to the other programs.
        tl.debug_barrier()
        is_last = tl.atomic_add(num_done_ptr + tile, 1, sem="acq_rel") == NUM_PARTS - 1
        if is_last:
            acc = _joined(acc, tile_ptr, in_part, part, NUM_PARTS, PART_VALUES)
            tl.store(num_done_ptr + tile, 0)
    if is_last:
        y = acc
        if OUTPUTS_FIRST:
            y = tl.trans(acc)
        if HAS_BIAS:
            y += tl.load(bias_ptr + offs_o, mask=is_out, other=0.0).to(tl.float32)[None, :]
        y_ptrs = y_ptr + offs_t.to(tl.int64)[:, None] * num_out + offs_o[None, :]
        tl.store(y_ptrs, y.to(y_ptr.dtype.element_ty), mask=is_row[:, None] & is_out[None, :])


def rows_linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, launch: RowsLaunch | None = None
) -> torch.Tensor:
    """See the package. `launch` replaces what was measured or is usual."""
    (num_rows, num_in), num_out = x.shape, len(weight)
    y = x.new_empty(num_rows, num_out)
    if num_out == 0:
        return y
    if launch is None:
        launch = launch_of(device_name(x.device), x.dtype, num_in, num_out)
    grid = grid_of(launch, num_multiprocessors(x.device), x.dtype, num_in, num_out, num_rows)
    parts, num_done = y, y  # not used
    if grid.num_parts > 1:
        parts = x.new_empty(grid.part_values, dtype=torch.float32)
        num_done = zero_counters(x, driver.active.get_current_stream(x.get_device()) if x.is_cuda else 0)
    prepared = _prepare(grid, launch, num_rows, num_out, num_in, x.stride(0), weight.stride(0), bias is not None)
    prepared(y, parts, num_done, x, weight, y if bias is None else bias)
    return y


@prepares
def _prepare(
    grid: RowsGrid,
    launch: RowsLaunch,
    num_rows: int,
    num_out: int,
    num_in: int,
    stride_xt: int,
    stride_wo: int,
    has_bias: bool,
) -> Prepared:
    numbers = {
        "num_rows": num_rows,
        "num_out": num_out,
        "num_in": num_in,
        "stride_xt": stride_xt,
        "stride_wo": stride_wo,
        "BLOCK_ROWS": grid.block_rows,
        "BLOCK_OUT": launch.block_out,
        "BLOCK_IN": launch.block_in,
        "NUM_PARTS": grid.num_parts,
        "IS_EVEN": num_in % launch.block_in == 0,
        "HAS_BIAS": has_bias,
        "num_warps": grid.num_warps,
        "num_stages": grid.num_stages,
    }
    return prepare(rows_linear_kernel, (grid.num_tiles, grid.num_parts), numbers)
