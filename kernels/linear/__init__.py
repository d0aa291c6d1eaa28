"""Products of rows with a linear's weight: in native code for the CPU, and of few rows on a GPU.

`linear` takes a weight in panels, which `to_panels` makes; `plain_linear` one as checkpoints have it, and so do
`row_linear` and `rows_linear`, which multiply one row and a few rows on a GPU.
"""

from __future__ import annotations

from functools import lru_cache

import torch

from kernels.devices import check_devices, device_name, is_hopper, runs_triton
from kernels.linear import native
from kernels.linear.panels import from_panels, to_panels
from kernels.linear.rows_launch import MAX_ROWS, launch_of
from kernels.tensor_spec import TensorSpec, spec_of

__all__ = [
    "MAX_ROWS",
    "from_panels",
    "linear",
    "plain_linear",
    "row_linear",
    "rows_linear",
    "serves_row",
    "serves_rows",
    "to_panels",
]


def linear(x: torch.Tensor, panels: torch.Tensor, bias: torch.Tensor | None, out_features: int) -> torch.Tensor:
    """[T, out] = x [T, in] @ weight.T + bias for panels that `to_panels` made of weight [out, in].

    Sums are float32, in the order of the inputs: a row's bits do not depend on the other rows. float32, bfloat16 and
    float16 on the CPU, where there is native code.
    """
    if x.dim() != 2 or panels.dtype != x.dtype:
        raise ValueError(f"x is {x.dtype} {tuple(x.shape)}, want {panels.dtype} [T, in] as the panels are")
    pairs = 2 if x.dtype == torch.bfloat16 else 1
    if (
        panels.shape[1] != -(-x.shape[1] // pairs)
        or not 0 <= panels.shape[0] * panels.shape[2] - out_features < (panels.shape[2])
    ):
        raise ValueError(f"panels {tuple(panels.shape)} are of no weight [{out_features}, {x.shape[1]}]")
    if bias is not None and (bias.shape != (out_features,) or bias.dtype != x.dtype):
        raise ValueError(f"bias is {bias.dtype} {tuple(bias.shape)}, want {x.dtype} [{out_features}]")
    return native.linear(x, panels, bias, out_features)


def plain_linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """`linear` for a weight [out, in] whose rows follow one another; its sums have another order."""
    if x.dim() != 2 or weight.dim() != 2 or weight.shape[1] != x.shape[1] or weight.dtype != x.dtype:
        raise ValueError(f"x is {x.dtype} {tuple(x.shape)} and weight {weight.dtype} {tuple(weight.shape)}")
    if not weight.is_contiguous():
        raise ValueError(f"weight must be contiguous, its strides are {weight.stride()}")
    if bias is not None and (bias.shape != (len(weight),) or bias.dtype != x.dtype):
        raise ValueError(f"bias is {bias.dtype} {tuple(bias.shape)}, want {x.dtype} [{len(weight)}]")
    return native.plain_linear(x, weight, bias)


def serves_row(x: torch.Tensor, weight: torch.Tensor) -> bool:
    """Whether `row_linear` multiplies these by its kernel: one row [..., in] on a GPU, and a weight with dense rows."""
    return runs_triton(x) and _is_row(spec_of(x), spec_of(weight))


@lru_cache(maxsize=1024)
def _is_row(x: TensorSpec, weight: TensorSpec) -> bool:
    are_rows_dense = x.strides[-1] == 1 and weight.strides[1] == 1
    return x.shape[:-1].numel() == 1 and are_rows_dense and weight.dtype == x.dtype


def row_linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """[1, out] = x [1, in] @ weight [out, in].T + bias [out] in x's dtype; by torch where `serves_row` is False.

    The weight's rows may lie apart, but the values of a row follow one another. Sums are float32 and rounded once.
    """
    _check_rows(spec_of(x), spec_of(weight), None if bias is None else spec_of(bias), most=1)
    if not runs_triton(x):
        return torch.nn.functional.linear(x, weight, bias)
    from kernels.linear.triton_row import row_linear as launch

    return launch(x, weight, bias)


def serves_rows(x: torch.Tensor, weight: torch.Tensor) -> bool:
    """Whether `rows_linear` multiplies these by its kernel, and faster than torch does.

    2 to MAX_ROWS rows [..., in] of 16-bit values on a GPU of Hopper's kind, or fewer where the weight's launch says so;
    rows lie at multiples of 32 bytes.
    """
    if not runs_triton(x):
        return False
    num_rows = _number_of_rows(spec_of(x), spec_of(weight))
    return (
        num_rows > 0
        and is_hopper(x)
        and num_rows <= launch_of(device_name(x.device), x.dtype, weight.shape[1], weight.shape[0]).most_rows
    )


@lru_cache(maxsize=1024)
def _number_of_rows(x: TensorSpec, weight: TensorSpec) -> int:
    """0: the kernel of several rows cannot multiply these."""
    num_rows = x.shape[:-1].numel()
    is_served = (
        2 <= num_rows <= MAX_ROWS
        and weight.dtype == x.dtype
        and x.dtype in (torch.bfloat16, torch.float16)
        and x.strides[-1] == weight.strides[1] == 1
        and not (x.strides[-2] | weight.strides[0] | weight.shape[1]) % 16
    )
    return num_rows if is_served else 0


def rows_linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """[T, out] = x [T, in] @ weight [out, in].T + bias [out] in x's dtype, for 1 to MAX_ROWS rows; see `row_linear`.

    By torch without a GPU of Hopper's kind. With one a row's bits do not depend on the other rows, nor on their number.
    """
    _check_rows(spec_of(x), spec_of(weight), None if bias is None else spec_of(bias), most=MAX_ROWS)
    if not (runs_triton(x) and is_hopper(x)):
        return torch.nn.functional.linear(x, weight, bias)
    from kernels.linear.triton_rows import rows_linear as launch

    return launch(x, weight, bias)


@lru_cache(maxsize=1024)
def _check_rows(x: TensorSpec, weight: TensorSpec, bias: TensorSpec | None, *, most: int) -> None:
    """Raise ValueError for what the kernels of 1 to `most` rows cannot multiply."""
    are_matrices = len(x.shape) == len(weight.shape) == 2
    if not (are_matrices and weight.shape[1] == x.shape[1] != 0 and 1 <= x.shape[0] <= most):
        rows = "1" if most == 1 else f"1 to {most}"
        raise ValueError(f"x is {tuple(x.shape)} and weight {tuple(weight.shape)}, want [{rows}, in] and [out, in]")
    if weight.dtype != x.dtype:
        raise ValueError(f"weight is {weight.dtype}, want {x.dtype} as x is")
    if weight.strides[1] != 1 or x.strides[1] != 1:
        raise ValueError(
            f"the values of a row must follow one another, x has strides {x.strides} and weight {weight.strides}; "
            "make them contiguous"
        )
    if bias is not None and (bias.shape != weight.shape[:1] or bias.dtype != x.dtype or not bias.is_contiguous()):
        raise ValueError(
            f"bias is {bias.dtype} {tuple(bias.shape)} with strides {bias.strides}, want {x.dtype} "
            f"[{weight.shape[0]}], contiguous"
        )
    check_devices(x=x, weight=weight, bias=bias)
