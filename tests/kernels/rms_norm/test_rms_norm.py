"""rms_norm: the definition against torch and transformers, the form for the CPU against the definition."""

from __future__ import annotations

import pytest
import torch
from transformers.models.gemma3.modeling_gemma3 import Gemma3RMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from kernels.rms_norm import cpu, reference, rms_norm
from kernels.rms_norm.cases import CASES, Case, make
from tests.kernels.tolerances import assert_close

EPS = 1e-5


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_equals_torch(case: Case) -> None:
    x, weight, residual = make(case, torch.float32)
    total = x if residual is None else x + residual
    expected = torch.nn.functional.rms_norm(total, (case.hidden,), weight + case.weight_offset, EPS)
    assert_close(reference.rms_norm(x, weight, EPS, residual, case.weight_offset), expected)
    assert residual is None or torch.equal(residual, total)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("norm_class", "weight_offset"), [(LlamaRMSNorm, 0.0), (Gemma3RMSNorm, 1.0)])
@torch.no_grad()
def test_equals_transformers(
    norm_class: type[LlamaRMSNorm] | type[Gemma3RMSNorm], weight_offset: float, dtype: torch.dtype
) -> None:
    x, weight, _ = make(CASES[2], dtype)
    norm = norm_class(len(weight), eps=EPS).to(dtype)
    norm.weight.copy_(weight)
    assert_close(rms_norm(x, weight, EPS, weight_offset=weight_offset), norm(x), magnitude=2.0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_the_cpu_equals_the_reference(case: Case, dtype: torch.dtype) -> None:
    x, weight, residual = make(case, dtype)
    total = None if residual is None else residual.clone()
    expected = reference.rms_norm(x, weight, EPS, total, case.weight_offset)
    before = x.clone()
    assert_close(cpu.rms_norm(x, weight, EPS, residual, case.weight_offset), expected)
    assert torch.equal(x, before)
    if residual is not None and total is not None:
        assert torch.equal(residual, total)


def test_wrong_shapes_are_refused() -> None:
    x, weight, _ = make(CASES[1], torch.float32)
    with pytest.raises(ValueError, match="weight"):
        rms_norm(x, weight[1:], EPS)
    with pytest.raises(ValueError, match="residual is"):
        rms_norm(x, weight, EPS, residual=x.half())
