"""The native rms_norm: the structure that rms_norm.c takes, and the op run alone."""

from __future__ import annotations

import ctypes

import torch

from kernels.native import DTYPES, Step, has_native, integers, pointers, run_one

_SERVED = (torch.float32, torch.bfloat16, torch.float16)


class RmsNorm(ctypes.Structure):
    """The source's argument; rms_norm.c says what the fields are."""

    _fields_ = [  # ctypes wants a list
        *pointers("x", "residual", "weight", "y"),
        *integers("x_stride", "residual_stride", "y_stride", "hidden", "dtype"),
        ("eps", ctypes.c_float),
        ("weight_offset", ctypes.c_float),
    ]


def can_serve(x: torch.Tensor, weight: torch.Tensor, residual: torch.Tensor | None) -> bool:
    """Whether the native op takes these: of one dtype on the CPU, with dense rows."""
    tensors = [x, weight] if residual is None else [x, weight, residual]
    is_fit = all(tensor.dtype == x.dtype and tensor.stride(-1) == 1 for tensor in tensors)
    return is_fit and x.dtype in _SERVED and has_native(*tensors)


def problem(
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    y: torch.Tensor,
    *,
    residual: torch.Tensor | None = None,
    weight_offset: float = 0.0,
) -> RmsNorm:
    """y [T, H] = rms_norm(x [T, H]); rows are dense and may lie apart; y may be x."""
    return RmsNorm(
        x=x.data_ptr(),
        residual=None if residual is None else residual.data_ptr(),
        weight=weight.data_ptr(),
        y=y.data_ptr(),
        x_stride=x.stride(0),
        residual_stride=0 if residual is None else residual.stride(0),
        y_stride=y.stride(0),
        hidden=x.shape[1],
        dtype=DTYPES[x.dtype],
        eps=eps,
        weight_offset=weight_offset,
    )


def rms_norm(
    x: torch.Tensor, weight: torch.Tensor, eps: float, residual: torch.Tensor | None, weight_offset: float
) -> torch.Tensor:
    """See the package."""
    y = x.new_empty(x.shape)
    of = problem(x, weight, eps, y, residual=residual, weight_offset=weight_offset)
    run_one("rms_norm", of, Step(num_tokens=len(x)))
    return y
