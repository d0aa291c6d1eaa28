"""gated_activation in native code against its definition."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch.nn import functional

from kernels.gated_activation import ACTIVATIONS, cpu, gated_activation, native, reference
from kernels.gated_activation.cases import CASES, Case, make
from tests.kernels.threads import in_threads
from tests.kernels.tolerances import assert_close

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def check(case: Case, activation: str, dtype: torch.dtype, seed: int = 0) -> None:
    x = make(case, dtype, seed=seed)
    assert native.can_serve(x)
    before = x.clone()
    actual = native.gated_activation(x, activation)
    assert_close(actual, reference.gated_activation(x, activation), magnitude=4.0)
    assert torch.equal(x, before)


def activated(gate: torch.Tensor, activation: str) -> torch.Tensor:
    """activation(gate) of gate [n], in gate's dtype."""
    return native.gated_activation(torch.cat([gate, torch.ones_like(gate)])[None], activation)[0]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_the_native_op_equals_the_reference(case: Case, activation: str, dtype: torch.dtype) -> None:
    check(case, activation, dtype)


@settings(max_examples=30)
@given(
    st.integers(1, 40),
    st.integers(1, 1500),
    st.booleans(),
    st.sampled_from(ACTIVATIONS),
    st.sampled_from(DTYPES),
)
def test_random_shapes_equal_the_reference(
    num_tokens: int, width: int, is_strided: bool, activation: str, dtype: torch.dtype
) -> None:
    check(Case("random", num_tokens, width, is_strided), activation, dtype, width)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_float32_activations_are_within_few_roundings_of_float64_ones(activation: str) -> None:
    """Over the range in which they are neither 0 nor the gate, and far out. Errors are relative to the gate: that is
    what 1 + erf, of numbers that nearly cancel, can reach."""
    gate = torch.cat([torch.linspace(-30, 30, 600_001), torch.logspace(-30, 38, 10_000)])
    gate = torch.cat([gate, -gate])
    wide = gate.double()
    exact = {
        "silu": lambda: wide * torch.sigmoid(wide),
        "gelu": lambda: wide * torch.special.erfc(-wide / math.sqrt(2)) / 2,
        "gelu_tanh": lambda: wide * torch.sigmoid(2 * math.sqrt(2 / math.pi) * (wide + 0.044715 * wide**3)),
    }[activation]()
    error = (activated(gate, activation).double() - exact).abs()
    assert float((error / wide.abs().clamp(min=1e-38)).max()) < 2.0**-22.5
    is_positive = wide > 0
    assert float((error / exact.abs().clamp(min=1e-38))[is_positive].max()) < 2.0**-22.5


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_every_16_bit_gate_is_within_one_step_of_the_exact_activation(activation: str, dtype: torch.dtype) -> None:
    """NaN where torch has NaN, and the same infinities."""
    gate = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int16).view(dtype)
    kind = "tanh" if activation == "gelu_tanh" else "none"
    wide = gate.double()
    exact = functional.silu(wide) if activation == "silu" else functional.gelu(wide, approximate=kind)
    ours, theirs = activated(gate, activation), exact.to(dtype)
    assert torch.equal(ours.isnan(), theirs.isnan())
    is_number = theirs.isfinite()
    assert torch.equal(ours[~is_number & ~theirs.isnan()], theirs[~is_number & ~theirs.isnan()])
    step = torch.finfo(dtype).eps * theirs.double().abs() + wide.abs().nan_to_num() * 2.0**-22
    error = (ours.double() - theirs.double()).abs()
    assert bool((error <= step + torch.finfo(dtype).smallest_normal)[is_number].all())


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_saturated_gates_are_exact(activation: str) -> None:
    """A gate of 64 passes up whole, one of -64 and one of 0 pass nothing."""
    gate = torch.tensor([64.0, 0.0, -64.0]).repeat(500)
    up = torch.arange(1500.0)
    actual = native.gated_activation(torch.cat([gate, up]).expand(2, -1).contiguous(), activation)
    assert torch.equal(actual[:, 0::3], (64 * up[0::3]).expand(2, -1))
    assert not actual[:, 1::3].any()
    assert actual[:, 2::3].abs().max() < 1e-20


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_the_activation_is_rounded_before_the_product(dtype: torch.dtype) -> None:
    """As torch does it: nearly all bits are torch's. Rounded once, a quarter of them differ."""
    x = make(Case("many", 20, 3000), dtype)
    is_same = native.gated_activation(x, "silu") == cpu.gated_activation(x, "silu")
    assert float(is_same.float().mean()) > 0.999
    once = native.gated_activation(x, "silu") == reference.gated_activation(x, "silu")
    assert float(once.float().mean()) < 0.9


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_bits_do_not_depend_on_the_threads_or_the_batch(activation: str, dtype: torch.dtype) -> None:
    x = make(Case("rows", 70, 2100), dtype)
    one, *others = in_threads(lambda: native.gated_activation(x, activation))
    for other in others:
        assert torch.equal(other, one)
    for row in (0, 33, 69):
        assert torch.equal(native.gated_activation(x[row : row + 1], activation)[0], one[row])


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_numbers_that_are_not_finite_stay_where_they_are(activation: str) -> None:
    x = make(Case("rows", 3, 100), torch.float32)
    expected = native.gated_activation(x, activation)
    x[0, 5], x[1, 105], x[2, 99], x[2, 7] = float("nan"), float("nan"), float("inf"), float("-inf")
    actual = native.gated_activation(x, activation)
    places = [(0, 5), (1, 5), (2, 99), (2, 7)]
    assert [bool(actual[place].isfinite()) for place in places] == [False] * 4
    is_other = torch.ones(3, 100, dtype=torch.bool)
    for place in places:
        is_other[place] = False
    assert torch.equal(actual[is_other], expected[is_other])


def test_what_the_op_does_not_serve_is_left_to_torch() -> None:
    x = torch.randn(3, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    assert not native.can_serve(x)
    assert not native.can_serve(x.float().t().contiguous().t())
    torch.testing.assert_close(gated_activation(x, "silu"), cpu.gated_activation(x, "silu"))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_products_are_rounded_to_the_nearest_ties_to_even(dtype: torch.dtype) -> None:
    """As torch rounds them, infinities and NaN too. Numbers below the smallest normal one may become 0: CPUs that
    convert to bfloat16 themselves have none."""
    up = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int16).view(dtype)
    for number in (1.0, 1.5, 3.0, 0.71, -0.2):
        gate = torch.full_like(up, number)
        expected = activated(gate, "silu") * up
        actual = native.gated_activation(torch.cat([gate, up])[None], "silu")[0]
        assert torch.equal(actual.isnan(), expected.isnan())
        is_normal = expected.abs() > torch.finfo(dtype).smallest_normal
        assert torch.equal(actual[is_normal], expected[is_normal])
        assert actual[~is_normal & ~expected.isnan()].abs().max() <= torch.finfo(dtype).smallest_normal
