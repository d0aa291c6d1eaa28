"""quantize_rows on the GPU: one program per row, one read of it. Other kernels that write FP8 share the helpers."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.buckets import round_up
from kernels.fp8 import FP8, MIN_SCALE, Fp8Rows
from kernels.triton_launch import kernel


@triton.jit
def saturate(values):
    """float32 within the range of float8e4nv; NaN stays, so that it shows."""
    return tl.clamp(values, -448.0, 448.0, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def scaled_row(values, MIN_SCALE: tl.constexpr):
    """The scale of float32 values [n], and the values over it, ready for the cast to float8e4nv."""
    scale = tl.maximum(tl.max(tl.abs(values), 0) * (1 / 448), MIN_SCALE)
    return scale, saturate(values * tl.div_rn(1.0, scale))


@triton.jit
def store_row(values, codes_ptr, scales_ptr, row, offs, WIDTH: tl.constexpr, MIN_SCALE: tl.constexpr):
    """Write a row's codes [T, WIDTH] and scale [T]. Values past WIDTH are zeros."""
    scale, scaled = scaled_row(values, MIN_SCALE)
    tl.store(scales_ptr + row, scale)
    tl.store(codes_ptr + row * WIDTH + offs, scaled.to(codes_ptr.dtype.element_ty), mask=offs < WIDTH)


@kernel
def quantize_rows_kernel(
    codes_ptr,  # [T, n], contiguous
    scales_ptr,  # float32 [T]
    x_ptr,  # [T, n]
    stride_xt,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    MIN_SCALE: tl.constexpr,
):
    """See the reference. Grid: (T,)."""
    row = tl.program_id(0).to(tl.int64)
    offs = tl.arange(0, BLOCK)
    values = tl.load(x_ptr + row * stride_xt + offs, mask=offs < WIDTH, other=0.0).to(tl.float32)
    store_row(values, codes_ptr, scales_ptr, row, offs, WIDTH, MIN_SCALE)


def num_warps_for(block: int) -> int:
    """Warps that hold a row padded to `block` values, 16 in each thread up to 16 warps."""
    return min(max(block // 512, 1), 16)


def empty_rows(num_rows: int, width: int, device: torch.device) -> Fp8Rows:
    """Rows for a kernel to fill."""
    codes = torch.empty(num_rows, width, dtype=FP8, device=device)
    return Fp8Rows(codes, torch.empty(num_rows, dtype=torch.float32, device=device))


def quantize_rows(x: torch.Tensor) -> Fp8Rows:
    """See the package."""
    num_tokens, width = x.shape
    rows = empty_rows(num_tokens, width, x.device)
    if num_tokens:
        block = round_up(max(width, 1))
        quantize_rows_kernel[(num_tokens,)](
            rows.codes,
            rows.scales,
            x,
            x.stride(0),
            WIDTH=width,
            BLOCK=block,
            MIN_SCALE=MIN_SCALE,
            num_warps=num_warps_for(block),
        )
    return rows
