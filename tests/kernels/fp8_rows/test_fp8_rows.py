"""quantize_rows: the definition against its formula, and that norms and gates write the same rows."""

from __future__ import annotations

import pytest
import torch

from kernels.fp8 import FP8, FP8_MAX, MIN_SCALE
from kernels.fp8_rows import quantize_rows, reference
from kernels.fp8_rows.cases import CASES, Case, make
from kernels.gated_activation import gated_activation, gated_activation_fp8
from kernels.rms_norm import rms_norm, rms_norm_fp8

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_every_value_is_within_half_a_step_of_its_code(case: Case, dtype: torch.dtype) -> None:
    """e4m3 has 3 bits of fraction, and steps of 2^-9 below 2^-6."""
    x = make(case, dtype)
    rows = reference.quantize_rows(x)
    assert rows.codes.dtype == FP8 and rows.codes.shape == x.shape and rows.scales.shape == (len(x),)
    values, scaled = x.double(), x.double() / rows.scales.double()[:, None]
    step = torch.clamp(scaled.abs().log2().floor(), min=-6).exp2() / 8
    error = (rows.codes.double() - scaled).abs()
    assert (error <= step / 2 * (1 + 1e-6)).all()
    if x.numel():
        largest = values.abs().amax(dim=1)
        assert (rows.codes.float().abs().amax(dim=1)[largest > 0] == FP8_MAX).all()


def test_a_row_of_zeros_has_the_least_scale() -> None:
    rows = quantize_rows(torch.zeros(2, 3))
    assert rows.scales.tolist() == [MIN_SCALE, MIN_SCALE] and not rows.codes.float().any()


def test_powers_of_two_keep_their_bits() -> None:
    x = torch.tensor([[448.0, -1.75, 0.0625], [7.0, 0.5, -0.25]])
    rows = quantize_rows(x)
    assert rows.scales.tolist() == [1.0, 7 / 448]
    assert torch.equal(rows.float(), x)


def test_a_row_that_is_not_finite_shows_and_spoils_no_other() -> None:
    x = torch.ones(3, 4)
    x[1, 2], x[2, 0] = float("nan"), float("inf")
    products = quantize_rows(x).float().sum(dim=1)
    assert products.isfinite().tolist() == [True, False, False]


def test_wrong_shapes_are_refused() -> None:
    with pytest.raises(ValueError, match="want \\[T, n\\]"):
        quantize_rows(torch.zeros(3))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_norms_and_gates_write_the_rows_of_their_own_results(dtype: torch.dtype) -> None:
    x = make(Case("rows", 5, 96), dtype)
    weight, residuals = torch.rand(96).to(dtype), [torch.ones_like(x) for _ in range(2)]
    y, rows = rms_norm_fp8(x, weight, 1e-5, residual=residuals[0], weight_offset=1.0)
    assert torch.equal(y, rms_norm(x, weight, 1e-5, residual=residuals[1], weight_offset=1.0))
    assert torch.equal(residuals[0], residuals[1])
    expected = reference.quantize_rows(y)
    assert torch.equal(rows.codes.view(torch.uint8), expected.codes.view(torch.uint8))
    assert torch.equal(rows.scales, expected.scales)
    y, rows = gated_activation_fp8(x, "silu")
    assert torch.equal(y, gated_activation(x, "silu"))
    assert torch.equal(rows.float(), reference.quantize_rows(y).float())


def test_norms_and_gates_refuse_what_they_refuse_without_fp8() -> None:
    x = torch.zeros(2, 6)
    with pytest.raises(ValueError, match="weight"):
        rms_norm_fp8(x, torch.ones(5), 1e-5)
    with pytest.raises(ValueError, match="activation is 'relu'"):
        gated_activation_fp8(x, "relu")
