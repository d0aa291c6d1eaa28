"""rms_norm in native code against its definition."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings, strategies as st

from kernels.native import Step, run_one
from kernels.rms_norm import native, reference, rms_norm
from kernels.rms_norm.cases import CASES, Case, make
from tests.kernels.threads import in_threads
from tests.kernels.tolerances import assert_close

EPS = 1e-5
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def check(case: Case, dtype: torch.dtype, seed: int = 0) -> None:
    """The result, and a residual's bits; x stays."""
    x, weight, residual = make(case, dtype, seed=seed)
    assert native.can_serve(x, weight, residual)
    total = None if residual is None else residual.clone()
    expected = reference.rms_norm(x, weight, EPS, total, case.weight_offset)
    before = x.clone()
    assert_close(native.rms_norm(x, weight, EPS, residual, case.weight_offset), expected)
    assert torch.equal(x, before)
    if residual is not None and total is not None:
        assert torch.equal(residual, total)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_the_native_op_equals_the_reference(case: Case, dtype: torch.dtype) -> None:
    check(case, dtype)


@settings(max_examples=30)
@given(
    st.integers(1, 40),
    st.integers(1, 700),
    st.booleans(),
    st.booleans(),
    st.sampled_from([0.0, 1.0]),
    st.sampled_from(DTYPES),
)
def test_random_shapes_equal_the_reference(
    num_tokens: int, hidden: int, has_residual: bool, is_strided: bool, weight_offset: float, dtype: torch.dtype
) -> None:
    check(Case("random", num_tokens, hidden, has_residual, weight_offset, is_strided), dtype, num_tokens)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_powers_of_two_come_out_bit_for_bit(dtype: torch.dtype) -> None:
    """Rows of +-2^n have a mean square of 4^n: every step is exact."""
    signs = torch.randint(0, 2, (5, 1024), generator=torch.Generator().manual_seed(0)) * 2.0 - 1
    x = (signs * torch.tensor([0.5, 1.0, 2.0, 8.0, 64.0])[:, None]).to(dtype)
    weight = (torch.arange(1024.0) % 64).to(dtype)
    residual = 3 * x
    actual = native.rms_norm(x, weight, 0.0, residual, 0.0)
    assert torch.equal(actual, signs.to(dtype) * weight)
    assert torch.equal(residual, 4 * x)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_bits_do_not_depend_on_the_threads_or_the_batch(dtype: torch.dtype) -> None:
    x, weight, residual = make(Case("rows", 50, 700, has_residual=True), dtype)
    assert residual is not None

    def run(begin: int, end: int) -> tuple[torch.Tensor, torch.Tensor]:
        stream = residual[begin:end].clone()
        return native.rms_norm(x[begin:end], weight, EPS, stream, 0.0), stream

    one, *others = in_threads(lambda: run(0, 50))
    for result, stream in others:
        assert torch.equal(result, one[0])
        assert torch.equal(stream, one[1])
    for row in (0, 7, 49):
        assert torch.equal(run(row, row + 1)[0][0], one[0][row])


def test_a_row_that_is_not_finite_spoils_no_other() -> None:
    x, weight, _ = make(Case("rows", 4, 100), torch.float32)
    expected = native.rms_norm(x, weight, EPS, None, 0.0)
    x[1, 3], x[2, 99] = float("nan"), float("inf")
    actual = native.rms_norm(x, weight, EPS, None, 0.0)
    assert torch.equal(actual[[0, 3]], expected[[0, 3]])
    assert actual[1].isnan().all()
    assert actual[2, 99].isnan() and not actual[2, :99].any()


@pytest.mark.parametrize("hidden", [37, 64, 96])
def test_a_column_slice_is_normed_in_place_and_its_neighbours_stay(hidden: int) -> None:
    wide = torch.randn(3, hidden + 20, generator=torch.Generator().manual_seed(0))
    before, weight = wide.clone(), torch.ones(hidden)
    part = wide[:, 7 : 7 + hidden]
    expected = reference.rms_norm(part, weight, EPS, None, 0.0)
    run_one("rms_norm", native.problem(part, weight, EPS, part), Step(num_tokens=3))
    assert_close(part, expected)
    assert torch.equal(wide[:, :7], before[:, :7])
    assert torch.equal(wide[:, 7 + hidden :], before[:, 7 + hidden :])


def test_what_the_op_does_not_serve_is_left_to_torch() -> None:
    x, weight, _ = make(CASES[2], torch.bfloat16)
    assert not native.can_serve(x, weight.float(), None)
    assert not native.can_serve(x.double(), weight.double(), None)
    assert not native.can_serve(x.t().contiguous().t(), weight, None)
    expected = reference.rms_norm(x, weight, EPS, None, 0.0)
    assert_close(rms_norm(x, weight.float(), EPS), expected)
