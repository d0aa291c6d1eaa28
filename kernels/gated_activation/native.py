"""The native gated_activation: the structure that gate.c takes, and the op run alone."""

from __future__ import annotations

import ctypes

import torch

from kernels.native import DTYPES, Step, has_native, integers, pointers, run_one

_SERVED = (torch.float32, torch.bfloat16, torch.float16)
_ACTIVATIONS = {"silu": 0, "gelu": 1, "gelu_tanh": 2}


class Gate(ctypes.Structure):
    """The source's argument; gate.c says what the fields are."""

    _fields_ = [*pointers("x", "y"), *integers("x_stride", "y_stride", "width", "dtype", "activation")]


def can_serve(x: torch.Tensor) -> bool:
    """Whether the native op takes x: on the CPU, with dense rows."""
    return x.dtype in _SERVED and x.stride(1) == 1 and has_native(x)


def problem(x: torch.Tensor, y: torch.Tensor, activation: str) -> Gate:
    """y [T, n] = gated_activation(x [T, 2 n]); rows are dense and may lie apart."""
    return Gate(
        x=x.data_ptr(),
        y=y.data_ptr(),
        x_stride=x.stride(0),
        y_stride=y.stride(0),
        width=y.shape[1],
        dtype=DTYPES[x.dtype],
        activation=_ACTIVATIONS[activation],
    )


def gated_activation(x: torch.Tensor, activation: str) -> torch.Tensor:
    """See the package."""
    y = x.new_empty(x.shape[0], x.shape[1] // 2)
    run_one("gate", problem(x, y, activation), Step(num_tokens=len(x)))
    return y
