"""gated_activation on the GPU: one read of both halves, one write. With FP8 rows a program has a whole row.

Multiply and add are never fused, so that triton_folded.py gives the same bits.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.buckets import ceil_div, round_up
from kernels.fp8 import MIN_SCALE, Fp8Rows
from kernels.fp8_rows.triton_kernel import empty_rows, num_warps_for, store_row
from kernels.triton_launch import Prepared, kernel, no_launch, prepare, prepares

BLOCK = 1024


@triton.jit
def gated(gate, up, ACTIVATION: tl.constexpr):
    """activation(gate) * up, float32."""
    if ACTIVATION == "silu":
        active = gate * tl.sigmoid(gate)
    elif ACTIVATION == "gelu":
        active = gate * 0.5 * (1.0 + tl.erf(gate * 0.7071067811865476))
    else:
        # 0.5 (1 + tanh(u)) = sigmoid(2 u), u = sqrt(2 / pi) (g + 0.044715 g^3)
        active = gate * tl.sigmoid(1.5957691216057308 * (gate + 0.044715 * gate * gate * gate))
    return active * up


@kernel
def gated_activation_kernel(
    y_ptr,  # [T, n], contiguous
    x_ptr,  # [T, 2 n]
    stride_xt,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    ACTIVATION: tl.constexpr,
):
    """y = activation(gate) * up in float32. Grid: (T, chunks of n)."""
    token = tl.program_id(0).to(tl.int64)
    offs = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_inside = offs < WIDTH
    gate = tl.load(x_ptr + token * stride_xt + offs, mask=is_inside, other=0.0).to(tl.float32)
    up = tl.load(x_ptr + token * stride_xt + WIDTH + offs, mask=is_inside, other=0.0).to(tl.float32)
    tl.store(y_ptr + token * WIDTH + offs, gated(gate, up, ACTIVATION).to(y_ptr.dtype.element_ty), mask=is_inside)


@kernel
def gated_activation_fp8_kernel(
    y_ptr,  # [T, n], contiguous
    codes_ptr,  # FP8 [T, n], contiguous
    scales_ptr,  # float32 [T]
    x_ptr,  # [T, 2 n]
    stride_xt,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    ACTIVATION: tl.constexpr,
    HAS_VALUES: tl.constexpr,
    MIN_SCALE: tl.constexpr,
):
    """y as gated_activation_kernel, written if HAS_VALUES, and its FP8 rows, of y as it is rounded. Grid: (T,)."""
    token = tl.program_id(0).to(tl.int64)
    offs = tl.arange(0, BLOCK)
    is_inside = offs < WIDTH
    gate = tl.load(x_ptr + token * stride_xt + offs, mask=is_inside, other=0.0).to(tl.float32)
    up = tl.load(x_ptr + token * stride_xt + WIDTH + offs, mask=is_inside, other=0.0).to(tl.float32)
    y = gated(gate, up, ACTIVATION).to(y_ptr.dtype.element_ty)
    if HAS_VALUES:
        tl.store(y_ptr + token * WIDTH + offs, y, mask=is_inside)
    store_row(y.to(tl.float32), codes_ptr, scales_ptr, token, offs, WIDTH, MIN_SCALE)


def gated_activation(x: torch.Tensor, activation: str) -> torch.Tensor:
    """See the package."""
    num_tokens, width = x.shape[0], x.shape[1] // 2
    y = x.new_empty(num_tokens, width)
    _prepare(x.shape, x.stride(0), activation)(y, x)
    return y


@prepares
def _prepare(shape: torch.Size, stride_xt: int, activation: str) -> Prepared:
    num_tokens, width = shape[0], shape[1] // 2
    if num_tokens == 0 or width == 0:
        return no_launch
    block = min(round_up(width), BLOCK)
    numbers = {
        "stride_xt": stride_xt,
        "WIDTH": width,
        "BLOCK": block,
        "ACTIVATION": activation,
        "enable_fp_fusion": False,
    }
    return prepare(gated_activation_kernel, (num_tokens, ceil_div(width, block)), numbers)


def gated_activation_fp8(x: torch.Tensor, activation: str, *, has_values: bool) -> tuple[torch.Tensor, Fp8Rows]:
    """See the package."""
    num_tokens, width = x.shape[0], x.shape[1] // 2
    y = torch.empty(num_tokens, width, dtype=x.dtype, device=x.device)
    rows = empty_rows(num_tokens, width, x.device)
    if num_tokens:
        block = round_up(max(width, 1))
        gated_activation_fp8_kernel[(num_tokens,)](
            y,
            rows.codes,
            rows.scales,
            x,
            x.stride(0),
            WIDTH=width,
            BLOCK=block,
            ACTIVATION=activation,
            HAS_VALUES=has_values,
            MIN_SCALE=MIN_SCALE,
            num_warps=num_warps_for(block),
            enable_fp_fusion=False,
        )
    return y, rows
