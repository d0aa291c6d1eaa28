"""The GPU kernels that write FP8 rows against the definition; in Triton's interpreter where there is no GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st

from kernels.fp8 import Fp8Rows
from kernels.fp8_rows import reference, triton_kernel
from kernels.fp8_rows.cases import CASES, Case, make
from kernels.gated_activation import ACTIVATIONS, cases as gate_cases, triton_kernel as gate_kernel
from kernels.rms_norm import cases as norm_cases, triton_kernel as norm_kernel

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
# NumPy's, of the interpreter: 1 / (1 + inf) is meant.
pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered in exp")


def check_rows(rows: Fp8Rows, values: torch.Tensor) -> None:
    """The bits of the codes and of the scales."""
    expected = reference.quantize_rows(values.cpu())
    assert torch.equal(rows.scales.cpu(), expected.scales)
    assert torch.equal(rows.codes.cpu().view(torch.uint8), expected.codes.view(torch.uint8))


def there(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A copy with the same strides on the device."""
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device).copy_(tensor)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_the_kernel_equals_the_reference(case: Case, dtype: torch.dtype, device: torch.device) -> None:
    x = make(case, dtype)
    check_rows(triton_kernel.quantize_rows(there(x, device)), x)


@settings(max_examples=6)
@given(st.integers(1, 5), st.integers(1, 700), st.booleans(), st.integers(0, 9))
def test_random_shapes_equal_the_reference(num_tokens: int, width: int, is_strided: bool, seed: int) -> None:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    x = make(Case("random", num_tokens, width, is_strided), torch.bfloat16, seed=seed)
    check_rows(triton_kernel.quantize_rows(there(x, device)), x)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", norm_cases.CASES, ids=lambda case: case.name)
def test_a_norm_writes_the_rows_of_its_result(case: norm_cases.Case, dtype: torch.dtype, device: torch.device) -> None:
    """Its result and its residual have the bits that they have without FP8."""
    x, weight, residual = norm_cases.make(case, dtype)
    x, weight = there(x, device), there(weight, device)
    streams = [None if residual is None else there(residual, device) for _ in range(2)]
    y, rows = norm_kernel.rms_norm_fp8(x, weight, 1e-5, streams[0], case.weight_offset)
    assert torch.equal(y, norm_kernel.rms_norm(x, weight, 1e-5, streams[1], case.weight_offset))
    assert streams[0] is None or streams[1] is None or torch.equal(streams[0], streams[1])
    check_rows(rows, y)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("case", gate_cases.CASES, ids=lambda case: case.name)
def test_a_gate_writes_the_rows_of_its_result(
    case: gate_cases.Case, activation: str, dtype: torch.dtype, device: torch.device
) -> None:
    x = there(gate_cases.make(case, dtype), device)
    y, rows = gate_kernel.gated_activation_fp8(x, activation, has_values=True)
    assert torch.equal(y, gate_kernel.gated_activation(x, activation))
    check_rows(rows, y)


@pytest.mark.filterwarnings("ignore:invalid value encountered in multiply")  # NumPy's: inf * 0 is meant
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_a_row_that_is_not_finite_shows_and_spoils_no_other(value: float, device: torch.device) -> None:
    x = make(Case("rows", 4, 100), torch.float32)
    x[2, 7] = value
    rows = triton_kernel.quantize_rows(x.to(device))
    assert rows.float().sum(dim=1).isfinite().tolist() == [True, True, False, True]
    check_rows(rows[0:2], x[0:2])
    check_rows(rows[3:4], x[3:4])


def test_a_row_past_2_to_the_31_values_is_found(device: torch.device) -> None:
    """Its offset needs 64 bits, the stride does not. Of the 4 GiB only the pages of three rows are ever touched."""
    far = torch.empty((1 << 31) + 16, dtype=torch.float16, device=device).as_strided((3, 16), (1 << 30, 1))
    far.copy_(torch.tensor([[7.0], [448.0], [14.0]]).expand(3, 16))
    rows = triton_kernel.quantize_rows(far)
    assert rows.scales.tolist() == [2.0**-6, 1.0, 2.0**-5] and (rows.codes.float() == 448).all()


def test_a_gate_leaves_out_values_that_nobody_reads(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """The rows are the same. What the values' memory held before is there still."""
    x = torch.randn(3, 2 * 40, generator=torch.Generator().manual_seed(0)).to(device)
    _, expected = gate_kernel.gated_activation_fp8(x, "silu", has_values=True)
    empty = torch.empty

    def filled(*arguments: Any, **named: Any) -> torch.Tensor:
        made = empty(*arguments, **named)
        return made.fill_(99.0) if made.dtype == x.dtype and made.dim() == 2 else made

    monkeypatch.setattr(torch, "empty", filled)
    values, rows = gate_kernel.gated_activation_fp8(x, "silu", has_values=False)
    assert torch.equal(values, torch.full_like(values, 99.0))
    assert torch.equal(rows.scales, expected.scales)
    assert torch.equal(rows.codes.view(torch.uint8), expected.codes.view(torch.uint8))
