"""FP8 rows and products on the GPU: the bits of the CPU, the definition's values, and an engine on FP8 weights."""

from __future__ import annotations

from operator import attrgetter
from pathlib import Path

import pytest
import torch

from kernels.cases import to_device
from kernels.fp8 import Fp8Rows
from kernels.fp8_linear import cases as linear_cases, fp8_linear, reference
from kernels.fp8_rows import cases as row_cases, quantize_rows
from kernels.gated_activation import cases as gate_cases, gated_activation_fp8
from kernels.rms_norm import cases as norm_cases, rms_norm_fp8
from tests.data_plane.engine.test_fp8_weights import check_first_tokens
from tests.kernels.tolerances import assert_close

pytestmark = pytest.mark.gpu

CUDA = torch.device("cuda")
case_name = attrgetter("name")


def assert_rows(rows: Fp8Rows, values: torch.Tensor) -> None:
    """The rows that the CPU makes of these values, bit for bit."""
    expected = quantize_rows(values.cpu())
    assert torch.equal(rows.scales.cpu(), expected.scales)
    assert torch.equal(rows.codes.cpu().view(torch.uint8), expected.codes.view(torch.uint8))


def test_an_engine_on_fp8_weights_gives_the_tokens_of_rounded_weights(tmp_path: Path) -> None:
    check_first_tokens(tmp_path, "cuda")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("case", [*row_cases.CASES, row_cases.Case("model", 65, 14336)], ids=case_name)
def test_rows_are_those_of_the_cpu(case: row_cases.Case, dtype: torch.dtype) -> None:
    x = row_cases.make(case, dtype)
    assert_rows(quantize_rows(to_device(x, CUDA)), x)


@pytest.mark.parametrize("hidden", [4096, 5120])
def test_a_norm_writes_the_rows_of_its_result(hidden: int) -> None:
    x, weight, residual = norm_cases.make(norm_cases.Case("model", 65, hidden, has_residual=True), torch.bfloat16)
    assert residual is not None
    x, weight, residual = (to_device(value, CUDA) for value in (x, weight, residual))
    y, rows = rms_norm_fp8(x, weight, 1e-5, residual=residual)
    assert_rows(rows, y)


@pytest.mark.parametrize("width", [14336, 28672])
def test_a_gate_writes_the_rows_of_its_result(width: int) -> None:
    """The wider one takes a launch of its own for the rows."""
    x = gate_cases.make(gate_cases.Case("model", 65, width), torch.bfloat16)
    y, rows = gated_activation_fp8(to_device(x, CUDA), "silu")
    assert_rows(rows, y)


@pytest.mark.parametrize(
    "case",
    [*linear_cases.CASES, *(linear_cases.Case(f"model, {rows}", rows, 4096, 6144) for rows in (1, 2, 64, 300))],
    ids=case_name,
)
def test_a_product_equals_the_definition(case: linear_cases.Case) -> None:
    x, weight, bias = linear_cases.make(case, torch.bfloat16)
    expected = reference.fp8_linear(x, weight, bias, torch.bfloat16)
    there = [Fp8Rows(rows.codes.to(CUDA), rows.scales.to(CUDA)) for rows in (x, weight)]
    actual = fp8_linear(there[0], there[1], None if bias is None else bias.to(CUDA), torch.bfloat16)
    assert_close(actual.cpu(), expected, magnitude=float(expected.float().abs().max()) if expected.numel() else 1.0)


@pytest.mark.parametrize(("out_features", "in_features"), [(6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336)])
def test_a_row_has_the_same_bits_beside_other_rows(out_features: int, in_features: int) -> None:
    """torch chooses the product's kernel by the number of rows."""
    generator = torch.Generator(CUDA).manual_seed(0)
    x = quantize_rows(torch.randn(300, in_features, device=CUDA, generator=generator, dtype=torch.bfloat16))
    weight = quantize_rows(torch.randn(out_features, in_features, device=CUDA, generator=generator))
    whole = fp8_linear(x, weight, None, torch.bfloat16)
    for begin, end in ((0, 1), (7, 8), (0, 16), (0, 64)):
        part = Fp8Rows(x.codes[begin:end], x.scales[begin:end])
        assert torch.equal(fp8_linear(part, weight, None, torch.bfloat16), whole[begin:end]), f"rows {begin} to {end}"


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("num_rows", [3, 64])
def test_a_row_that_is_not_finite_spoils_no_other(value: float, num_rows: int) -> None:
    x = torch.randn(num_rows, 4096, generator=torch.Generator().manual_seed(0)).to(CUDA, torch.bfloat16)
    weight = quantize_rows(torch.randn(512, 4096, generator=torch.Generator().manual_seed(1)).to(CUDA))
    expected = fp8_linear(quantize_rows(x), weight, None, torch.bfloat16)
    x[1, 7] = value
    found = fp8_linear(quantize_rows(x), weight, None, torch.bfloat16)
    assert found.isfinite().all(dim=1).tolist() == [row != 1 for row in range(num_rows)]
    others = torch.arange(num_rows, device=CUDA) != 1
    assert torch.equal(found[others], expected[others])


def test_a_weight_that_no_gpu_multiplies_is_refused_by_its_size() -> None:
    rows = quantize_rows(torch.ones(24, 40, device=CUDA))
    with pytest.raises(ValueError, match="the product is of 24 outputs and 40 inputs, want multiples of 16"):
        fp8_linear(rows, rows, None, torch.bfloat16)
    rows = quantize_rows(torch.ones(16, 32, device=CUDA))
    with pytest.raises(ValueError, match=r"the product is of torch\.float16, want torch\.bfloat16"):
        fp8_linear(rows, rows, None, torch.float16)
