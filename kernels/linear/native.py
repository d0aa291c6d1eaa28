"""The native products of rows with a weight, in panels or plain: the structure that linear.c and plain.c take."""

from __future__ import annotations

import ctypes

import torch

from kernels.native import DTYPES, Step, integers, pointers, run_one


class Linear(ctypes.Structure):
    """The sources' argument; linear.h says what the fields are."""

    _fields_ = [  # ctypes wants a list
        *pointers("x", "panels", "bias", "y"),
        *integers("x_stride", "y_stride", "in_features", "out_features", "dtype"),
    ]


def problem(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, y: torch.Tensor) -> Linear:
    """y [T, out] = x [T, in] @ weight.T + bias; rows of x and y are dense, and may lie apart.

    The weight is in panels for the op "linear", plain [out, in] for "plain_linear".
    """
    return Linear(
        x=x.data_ptr(),
        panels=weight.data_ptr(),
        bias=None if bias is None else bias.data_ptr(),
        y=y.data_ptr(),
        x_stride=x.stride(0),
        y_stride=y.stride(0),
        in_features=x.shape[1],
        out_features=y.shape[1],
        dtype=DTYPES[x.dtype],
    )


def linear(x: torch.Tensor, panels: torch.Tensor, bias: torch.Tensor | None, out_features: int) -> torch.Tensor:
    """[T, out] for x [T, in]."""
    x = x.contiguous()
    y = x.new_empty(x.shape[0], out_features)
    run_one("linear", problem(x, panels, bias, y), Step(num_tokens=x.shape[0]))
    return y


def plain_linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """[T, out] for x [T, in] and a plain weight [out, in] with dense rows."""
    x = x.contiguous()
    y = x.new_empty(x.shape[0], len(weight))
    run_one("plain_linear", problem(x, weight, bias, y), Step(num_tokens=x.shape[0]))
    return y
