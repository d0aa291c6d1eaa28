"""The GPU's product of one row against its definition; in Triton's interpreter where there is no GPU."""

from __future__ import annotations

import pytest
import torch

from data_plane.layers.packed_weight import unpacked_linear
from kernels.cases import to_device
from kernels.linear import row_linear, serves_row, triton_row
from kernels.linear.cases import ROW_CASES, Case, make
from tests.kernels.tolerances import assert_close

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.fixture(autouse=True)
def _triton_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kernels.linear.runs_triton", lambda tensor: True)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", ROW_CASES, ids=lambda case: case.name)
def test_equals_the_definition_in_float64(case: Case, dtype: torch.dtype, device: torch.device) -> None:
    x, weight, bias = make(case, dtype)
    actual = row_linear(x.to(device), weight.to(device), None if bias is None else bias.to(device))
    expected = x.double() @ weight.double().T + (0 if bias is None else bias.double())
    assert actual.dtype == dtype and actual.is_contiguous()
    assert_close(actual.cpu(), expected.to(dtype))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_the_bias_is_added_before_the_one_rounding(dtype: torch.dtype, device: torch.device) -> None:
    """A sum that was rounded first would lose its 1, which the bias leaves alone."""
    step = 2.0 ** {torch.bfloat16: 8, torch.float16: 11}[dtype]  # the first number whose successor cannot be held
    x = torch.ones(1, 2, dtype=dtype, device=device)
    weight = torch.tensor([[step, 1.0]], dtype=dtype, device=device)
    bias = torch.tensor([-step], dtype=dtype, device=device)
    assert row_linear(x, weight, bias).item() == 1.0


@pytest.mark.parametrize("num_in", [48, 9000])
def test_only_the_rows_of_the_weight_are_read_and_all_outputs_written(
    num_in: int, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The weight is a part of a larger one that is full of NaN, and so is the output's memory."""
    new_empty = torch.Tensor.new_empty
    monkeypatch.setattr(
        torch.Tensor, "new_empty", lambda *args, **kwargs: new_empty(*args, **kwargs).fill_(float("nan"))
    )
    memory = torch.full((9, num_in + 16), float("nan"), device=device)
    weight = memory[3:6, 8 : 8 + num_in].fill_(2.0)
    actual = row_linear(torch.ones(1, num_in, device=device), weight, None)
    assert actual.tolist() == [[2.0 * num_in] * 3]


def test_a_row_past_2_to_the_31_values_is_found(device: torch.device) -> None:
    """Its offset needs 64 bits, the stride does not. Of the 4 GiB only the pages of three rows are ever touched."""
    far = torch.empty((1 << 31) + 16, dtype=torch.float16, device=device).as_strided((3, 16), (1 << 30, 1))
    far.copy_(torch.tensor([[2.0], [4.0], [6.0]]).expand(3, 16))
    x = torch.ones(1, 16, dtype=torch.float16, device=device)
    assert row_linear(x, far, None).tolist() == [[32.0, 64.0, 96.0]]


@pytest.mark.parametrize("shape", [(64,), (1, 64), (1, 1, 64)], ids=str)
def test_a_linear_of_one_row_runs_the_kernel(
    shape: tuple[int, ...], device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows: list[torch.Tensor] = []
    multiply = triton_row.row_linear

    def noted(x: torch.Tensor, *others: torch.Tensor) -> torch.Tensor:
        rows.append(x)
        return multiply(x, others[0], others[1])

    monkeypatch.setattr(triton_row, "row_linear", noted)
    x, weight, bias = (to_device(tensor, device) for tensor in make(Case("", 1, 64, 40, has_bias=True), torch.float32))
    actual = unpacked_linear(x.view(shape), weight, bias)
    assert actual.shape == (*shape[:-1], 40)
    assert_close(actual.view(1, -1), torch.nn.functional.linear(x, weight, bias))
    assert [row.shape for row in rows] == [(1, 64)]


def test_other_linears_are_torchs() -> None:
    x, weight, _ = make(Case("", 2, 64, 64), torch.float32)
    assert serves_row(x[:1], weight)
    assert not serves_row(x, weight)
    assert not serves_row(x[:0], weight)
    assert not serves_row(x[:1], weight.T)
    assert not serves_row(x.T[:64, :1].T[:, ::2], weight[:, :32])
    assert not serves_row(x[:1].half(), weight)
    assert torch.equal(unpacked_linear(x, weight.T, None), torch.nn.functional.linear(x, weight.T))


def test_wrong_arguments_are_refused() -> None:
    x, weight, _ = make(Case("", 1, 8, 8), torch.float32)
    for wrong in (x[0], x.expand(2, 8), x[:, :4], x[:0]):
        with pytest.raises(ValueError, match=r"want \[1, in\] and \[out, in\]"):
            row_linear(wrong, weight, None)
    with pytest.raises(ValueError, match=r"want \[1, in\] and \[out, in\]"):
        row_linear(x[:, :0], weight[:, :0], None)
    with pytest.raises(ValueError, match=r"weight is torch\.float32, want torch\.float16"):
        row_linear(x.half(), weight, None)
    with pytest.raises(ValueError, match="must follow one another"):
        row_linear(x, weight.T, None)
    with pytest.raises(ValueError, match=r"bias is torch\.float32 \(7,\)"):
        row_linear(x, weight, torch.zeros(7))
    with pytest.raises(ValueError, match="contiguous"):
        row_linear(x, weight, torch.zeros(16)[::2])
    with pytest.raises(ValueError, match="weight is on meta, x on cpu"):
        row_linear(x, weight.to("meta"), None)
