"""gated_activation: the definition against its formula, the form for the CPU against the definition."""

from __future__ import annotations

import math

import pytest
import torch

from kernels.gated_activation import ACTIVATIONS, cpu, gated_activation, reference
from kernels.gated_activation.cases import CASES, Case, make
from tests.kernels.tolerances import assert_close


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_equals_the_formula(case: Case, activation: str) -> None:
    """In float64."""
    x = make(case, torch.float32)
    gate, up = x.double().chunk(2, dim=1)
    factor = {
        "silu": 1 / (1 + (-gate).exp()),
        "gelu": (1 + torch.erf(gate / math.sqrt(2))) / 2,
        "gelu_tanh": (1 + torch.tanh(math.sqrt(2 / math.pi) * (gate + 0.044715 * gate**3))) / 2,
    }[activation]
    assert_close(reference.gated_activation(x, activation), (gate * factor * up).float(), magnitude=4.0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_the_cpu_equals_the_reference(case: Case, activation: str, dtype: torch.dtype) -> None:
    x = make(case, dtype)
    before = x.clone()
    assert_close(cpu.gated_activation(x, activation), reference.gated_activation(x, activation), magnitude=4.0)
    assert torch.equal(x, before)


def test_wrong_arguments_are_refused() -> None:
    with pytest.raises(ValueError, match=r"want \[T, 2 n\]"):
        gated_activation(torch.zeros(2, 3), "silu")
    with pytest.raises(ValueError, match="activation is 'relu'"):
        gated_activation(torch.zeros(2, 4), "relu")
