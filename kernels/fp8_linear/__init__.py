"""Products of FP8 rows with an FP8 weight. `fp8_linear` is the only public call."""

from __future__ import annotations

import torch

from kernels.devices import check_devices
from kernels.fp8 import FP8, Fp8Rows
from kernels.fp8_linear import reference, scaled_mm

__all__ = ["fp8_linear", "size_problem"]

# torch's product wants both sizes of a weight as multiples of it.
MULTIPLE = 16


def fp8_linear(x: Fp8Rows, weight: Fp8Rows, bias: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor:
    """[T, out] in `dtype` = x [T, in] @ weight [out, in].T + bias [out], which is of that dtype.

    On a GPU `dtype` is bfloat16, and both sizes of the weight are multiples of 16. Elsewhere the definition computes.
    """
    if x.codes.dtype != FP8 or weight.codes.dtype != FP8:
        raise ValueError(f"x is {x.codes.dtype} and weight {weight.codes.dtype}, want both {FP8}")
    if x.codes.dim() != 2 or weight.codes.dim() != 2 or x.codes.shape[1] != weight.codes.shape[1]:
        raise ValueError(
            f"x is {tuple(x.codes.shape)} and weight {tuple(weight.codes.shape)}, want [T, in] and [out, in]"
        )
    for name, rows in (("x", x), ("weight", weight)):
        if rows.scales.dtype != torch.float32 or rows.scales.shape != rows.codes.shape[:1]:
            raise ValueError(
                f"the scales of {name} are {rows.scales.dtype} {tuple(rows.scales.shape)}, want float32 "
                f"[{len(rows.codes)}]"
            )
    if bias is not None and (bias.dtype != dtype or bias.shape != (len(weight.codes),)):
        raise ValueError(f"bias is {bias.dtype} {tuple(bias.shape)}, want {dtype} [{len(weight.codes)}]")
    check_devices(x=x.codes, weight=weight.codes, x_scales=x.scales, weight_scales=weight.scales, bias=bias)
    if not x.codes.is_cuda:
        return reference.fp8_linear(x, weight, bias, dtype)
    problem = size_problem(*weight.codes.shape) or (f"{dtype}, want {torch.bfloat16}" * (dtype != torch.bfloat16))
    if problem:
        raise ValueError(f"the product is of {problem}")
    return scaled_mm.fp8_linear(x, weight, bias, dtype)


def size_problem(out_features: int, in_features: int) -> str:
    """Why a GPU multiplies no FP8 weight of this size; empty: it does."""
    if out_features % MULTIPLE == 0 and in_features % MULTIPLE == 0:
        return ""
    return f"{out_features} outputs and {in_features} inputs, want multiples of {MULTIPLE}"
