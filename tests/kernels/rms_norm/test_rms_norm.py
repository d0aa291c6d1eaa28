"""rms_norm: the definition against torch, the GPU kernel against the definition."""

from __future__ import annotations

import pytest
import torch

from kernels.rms_norm import reference, rms_norm, triton_kernel
from kernels.rms_norm.cases import CASES, Case, make
from tests.kernels.tolerances import assert_close

EPS = 1e-5


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_equals_torch(case: Case) -> None:
    x, weight, residual = make(case, torch.float32)
    total = x if residual is None else x + residual
    expected = torch.nn.functional.rms_norm(total, (case.hidden,), weight + case.weight_offset, EPS)
    assert_close(rms_norm(x, weight, EPS, residual=residual, weight_offset=case.weight_offset), expected)
    assert residual is None or torch.equal(residual, total)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_the_gpu_kernel_equals_the_reference(case: Case, dtype: torch.dtype, device: torch.device) -> None:
    x, weight, residual = make(case, dtype)
    there = [None if tensor is None else tensor.to(device, copy=True) for tensor in (x, weight, residual)]
    assert there[0] is not None and there[1] is not None
    actual = triton_kernel.rms_norm(there[0], there[1], EPS, there[2], case.weight_offset)
    assert_close(actual.cpu(), reference.rms_norm(x, weight, EPS, residual, case.weight_offset))
    if residual is not None and there[2] is not None:
        assert_close(there[2].cpu(), residual)


def test_powers_of_two_come_out_bit_for_bit(device: torch.device) -> None:
    """Rows of +-2^n have a mean square of 4^n: every step is exact."""
    signs = torch.randint(0, 2, (5, 64), generator=torch.Generator().manual_seed(0)) * 2.0 - 1
    x = signs * torch.tensor([0.5, 1.0, 2.0, 8.0, 64.0])[:, None]
    weight = torch.arange(64.0)
    actual = triton_kernel.rms_norm(x.to(device), weight.to(device), 0.0, None, 0.0).cpu()
    assert torch.equal(actual, signs * weight)


def test_wrong_shapes_are_refused() -> None:
    x, weight, _ = make(CASES[1], torch.float32)
    with pytest.raises(ValueError, match="weight"):
        rms_norm(x, weight[1:], EPS)
    with pytest.raises(ValueError, match="residual is"):
        rms_norm(x, weight, EPS, residual=x.half())
