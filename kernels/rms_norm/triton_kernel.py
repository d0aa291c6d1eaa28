"""rms_norm on the GPU: one program per token, one read of the row.

Multiply and add are never fused: each is rounded by itself, as in the definition.
"""

from __future__ import annotations

import torch
import triton.language as tl

from kernels.buckets import round_up
from kernels.fp8 import MIN_SCALE, Fp8Rows
from kernels.fp8_rows.triton_kernel import empty_rows, num_warps_for, store_row
from kernels.triton_launch import Prepared, kernel, no_launch, prepare, prepares


@kernel
def rms_norm_kernel(
    # pointers
    y_ptr,  # [T, H], contiguous
    x_ptr,  # [T, H]
    residual_ptr,  # [T, H], read and written if HAS_RESIDUAL
    weight_ptr,  # [H]
    codes_ptr,  # FP8 [T, H], contiguous, written if HAS_CODES
    scales_ptr,  # float32 [T], written if HAS_CODES
    # numbers
    eps,
    weight_offset,
    # strides
    stride_xt,
    stride_rt,
    # sizes and options
    HIDDEN: tl.constexpr,
    BLOCK_H: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    HAS_CODES: tl.constexpr,
    MIN_SCALE: tl.constexpr,
):
    """See the reference. Grid: (T,). Sums are float32. Codes are of the norm as it is rounded."""
    token = tl.program_id(0).to(tl.int64)
    offs = tl.arange(0, BLOCK_H)
    is_inside = offs < HIDDEN
    x = tl.load(x_ptr + token * stride_xt + offs, mask=is_inside, other=0.0).to(tl.float32)
    if HAS_RESIDUAL:
        residual_ptrs = residual_ptr + token * stride_rt + offs
        x += tl.load(residual_ptrs, mask=is_inside, other=0.0).to(tl.float32)
        rounded = x.to(residual_ptr.dtype.element_ty)
        tl.store(residual_ptrs, rounded, mask=is_inside)
        x = rounded.to(tl.float32)
    scale = 1.0 / tl.sqrt(tl.sum(x * x, 0) / HIDDEN + eps)
    weight = tl.load(weight_ptr + offs, mask=is_inside, other=0.0).to(tl.float32) + weight_offset
    y = (x * scale * weight).to(y_ptr.dtype.element_ty)
    tl.store(y_ptr + token * HIDDEN + offs, y, mask=is_inside)
    if HAS_CODES:
        store_row(y.to(tl.float32), codes_ptr, scales_ptr, token, offs, HIDDEN, MIN_SCALE)


def rms_norm(
    x: torch.Tensor, weight: torch.Tensor, eps: float, residual: torch.Tensor | None, weight_offset: float
) -> torch.Tensor:
    """See the package."""
    return _launch(x, weight, eps, residual, weight_offset, None)


def rms_norm_fp8(
    x: torch.Tensor, weight: torch.Tensor, eps: float, residual: torch.Tensor | None, weight_offset: float
) -> tuple[torch.Tensor, Fp8Rows]:
    """See the package."""
    rows = empty_rows(x.shape[0], x.shape[1], x.device)
    return _launch(x, weight, eps, residual, weight_offset, rows), rows


def _launch(
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    residual: torch.Tensor | None,
    weight_offset: float,
    rows: Fp8Rows | None,
) -> torch.Tensor:
    y = torch.empty_like(x, memory_format=torch.contiguous_format)
    stride_rt = None if residual is None else residual.stride(0)
    launch = _prepare(x.shape, x.stride(0), stride_rt, rows is not None, eps, weight_offset)
    codes, scales = (y, y) if rows is None else (rows.codes, rows.scales)
    launch(y, x, y if residual is None else residual, weight, codes, scales)
    return y


@prepares
def _prepare(
    shape: torch.Size, stride_xt: int, stride_rt: int | None, has_codes: bool, eps: float, weight_offset: float
) -> Prepared:
    num_tokens, hidden = shape
    if num_tokens == 0:
        return no_launch
    block = round_up(hidden)
    numbers = {
        "eps": eps,
        "weight_offset": weight_offset,
        "stride_xt": stride_xt,
        "stride_rt": stride_rt or 0,
        "HIDDEN": hidden,
        "BLOCK_H": block,
        "HAS_RESIDUAL": stride_rt is not None,
        "HAS_CODES": has_codes,
        "MIN_SCALE": MIN_SCALE,
        "num_warps": num_warps_for(block),
        "enable_fp_fusion": False,
    }
    return prepare(rms_norm_kernel, (num_tokens,), numbers)
