"""rms_norm's GPU kernel against its definition; in Triton's interpreter where there is no GPU."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings, strategies as st

from kernels.rms_norm import reference, triton_kernel
from kernels.rms_norm.cases import CASES, Case, make
from tests.kernels.tolerances import assert_close

EPS = 1e-5


def check(case: Case, dtype: torch.dtype, device: torch.device, seed: int = 0) -> None:
    x, weight, residual = make(case, dtype, seed=seed)
    there = [
        None if tensor is None else torch.empty_strided(tensor.shape, tensor.stride(), dtype=dtype, device=device)
        for tensor in (x, weight, residual)
    ]
    for tensor, value in zip(there, (x, weight, residual), strict=True):
        if tensor is not None and value is not None:
            tensor.copy_(value)
    assert there[0] is not None and there[1] is not None
    actual = triton_kernel.rms_norm(there[0], there[1], EPS, there[2], case.weight_offset)
    assert_close(actual.cpu(), reference.rms_norm(x, weight, EPS, residual, case.weight_offset))
    if residual is not None and there[2] is not None:
        assert_close(there[2].cpu(), residual)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_the_kernel_equals_the_reference(case: Case, dtype: torch.dtype, device: torch.device) -> None:
    check(case, dtype, device)


@settings(max_examples=6)
@given(st.integers(1, 5), st.integers(1, 700), st.booleans(), st.booleans(), st.sampled_from([0.0, 1.0]))
def test_random_shapes_equal_the_reference(
    num_tokens: int, hidden: int, has_residual: bool, is_strided: bool, weight_offset: float
) -> None:
    case = Case("random", num_tokens, hidden, has_residual, weight_offset, is_strided)
    check(case, torch.float32, torch.device("cuda" if torch.cuda.is_available() else "cpu"), num_tokens)


@pytest.mark.parametrize("has_residual", [False, True])
@pytest.mark.parametrize("hidden", [64, 1024])
def test_powers_of_two_come_out_bit_for_bit(hidden: int, *, has_residual: bool, device: torch.device) -> None:
    """Rows of +-2^n have a mean square of 4^n: every step is exact."""
    signs = torch.randint(0, 2, (5, hidden), generator=torch.Generator().manual_seed(0)) * 2.0 - 1
    x = signs * torch.tensor([0.5, 1.0, 2.0, 8.0, 64.0])[:, None]
    weight = torch.arange(float(hidden))
    residual = (3 * x).to(device) if has_residual else None
    actual = triton_kernel.rms_norm(x.to(device), weight.to(device), 0.0, residual, 0.0).cpu()
    assert torch.equal(actual, signs * weight)
    assert residual is None or torch.equal(residual.cpu(), 4 * x)


def test_every_value_of_the_result_is_written(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Into memory full of NaN."""
    empty_like = torch.empty_like
    monkeypatch.setattr(torch, "empty_like", lambda *args, **kwargs: empty_like(*args, **kwargs).fill_(float("nan")))
    x = torch.ones(3, 37, device=device)
    assert triton_kernel.rms_norm(x, x[0], EPS, None, 0.0).isfinite().all()


def test_a_rows_bits_do_not_depend_on_the_batch(device: torch.device) -> None:
    x, weight, _ = make(Case("rows", 4, 300), torch.float32, device=device.type)
    together = triton_kernel.rms_norm(x, weight, EPS, None, 0.0)
    assert torch.equal(triton_kernel.rms_norm(x[2:3], weight, EPS, None, 0.0), together[2:3])


def test_a_row_past_2_to_the_31_values_is_found(device: torch.device) -> None:
    """Its offset needs 64 bits, the stride does not. Of the 4 GiB only the pages of three rows are ever touched."""
    far = torch.empty((1 << 31) + 16, dtype=torch.float16, device=device).as_strided((3, 16), (1 << 30, 1))
    far.copy_(torch.tensor([[2.0], [4.0], [8.0]]).expand(3, 16))
    residual = torch.zeros(3, 16, dtype=torch.float16, device=device)
    actual = triton_kernel.rms_norm(far, torch.arange(16.0, device=device).half(), 0.0, residual, 0.0)
    assert torch.equal(actual.cpu(), torch.arange(16.0).half().expand(3, 16))
    assert residual[:, 0].tolist() == [2, 4, 8]
