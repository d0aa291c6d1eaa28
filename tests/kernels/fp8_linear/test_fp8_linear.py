"""fp8_linear: the definition against float64, what is refused, and torch's own checks of the call that a GPU gets."""

from __future__ import annotations

import pytest
import torch

from kernels.fp8 import Fp8Rows
from kernels.fp8_linear import fp8_linear, scaled_mm, size_problem
from kernels.fp8_linear.cases import CASES, Case, make
from tests.kernels.tolerances import assert_close


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_equals_the_product_of_what_the_numbers_stand_for(case: Case, dtype: torch.dtype) -> None:
    x, weight, bias = make(case, dtype)
    values = [rows.codes.double() * rows.scales.double()[:, None] for rows in (x, weight)]
    expected = values[0] @ values[1].T
    if bias is not None:
        expected += bias.double()
    assert_close(fp8_linear(x, weight, bias, dtype), expected.to(dtype))


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_torch_takes_the_call_of_a_gpu(case: Case) -> None:
    """Its checks of types, sizes, strides and scales run without a device."""
    x, weight, bias = make(case, torch.bfloat16)
    meta = [Fp8Rows(rows.codes.to("meta"), rows.scales.to("meta")) for rows in (x, weight)]
    y = scaled_mm.fp8_linear(meta[0], meta[1], None if bias is None else bias.to("meta"), torch.bfloat16)
    assert y.shape == (case.num_tokens, case.out_features) and y.dtype == torch.bfloat16


def test_sizes_that_a_gpu_does_not_multiply_have_a_reason() -> None:
    assert size_problem(48, 4096) == ""
    assert size_problem(1, 4096) == "1 outputs and 4096 inputs, want multiples of 16"
    assert size_problem(16, 40) == "16 outputs and 40 inputs, want multiples of 16"


def test_wrong_arguments_are_refused() -> None:
    x, weight, bias = make(CASES[2], torch.float32)
    assert bias is not None
    with pytest.raises(ValueError, match="want \\[T, in\\] and \\[out, in\\]"):
        fp8_linear(x, Fp8Rows(weight.codes[:, :32], weight.scales), None, torch.float32)
    with pytest.raises(ValueError, match=r"the scales of weight are torch\.float32 \(15,\), want float32 \[16\]"):
        fp8_linear(x, Fp8Rows(weight.codes, weight.scales[:15]), None, torch.float32)
    with pytest.raises(ValueError, match=r"bias is torch\.float32"):
        fp8_linear(x, weight, bias, torch.bfloat16)
    with pytest.raises(ValueError, match=r"want both torch\.float8_e4m3fn"):
        fp8_linear(Fp8Rows(x.float(), x.scales), weight, None, torch.float32)
