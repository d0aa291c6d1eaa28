"""The native product of rows with packed weights against the definition."""

from __future__ import annotations

import pytest
import torch

from kernels.linear import from_panels, linear, plain_linear, reference, to_panels
from kernels.linear.cases import CASES, Case, make
from kernels.native import set_num_threads
from tests.kernels.tolerances import assert_close

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_equals_the_reference(case: Case, dtype: torch.dtype) -> None:
    x, weight, bias = make(case, dtype)
    expected = reference.linear(x, weight, bias)
    assert_close(linear(x, to_panels(weight), bias, case.out_features), expected)
    assert_close(plain_linear(x, weight, bias), expected)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_weight_comes_back_from_its_panels(case: Case, dtype: torch.dtype) -> None:
    _, weight, _ = make(case, dtype)
    assert torch.equal(from_panels(to_panels(weight), case.out_features, case.in_features), weight)


@pytest.mark.parametrize("in_features", [96, 1301])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_row_has_the_same_bits_in_every_batch_and_number_of_threads(
    dtype: torch.dtype, in_features: int, request: pytest.FixtureRequest
) -> None:
    request.addfinalizer(lambda: set_num_threads(torch.get_num_threads()))
    x, weight, _ = make(Case("", 205, in_features, 130), dtype)
    panels = to_panels(weight)
    whole, plain = linear(x, panels, None, 130), plain_linear(x, weight, None)
    for num_threads in (1, 2, 3):
        set_num_threads(num_threads)
        for begin, end in ((0, 1), (3, 14), (100, 205), (0, 205)):
            assert torch.equal(linear(x[begin:end], panels, None, 130), whole[begin:end])
            assert torch.equal(plain_linear(x[begin:end], weight, None), plain[begin:end])


def test_what_is_not_finite_stays_in_its_row() -> None:
    x, weight, _ = make(Case("", 14, 33, 40), torch.bfloat16)
    panels = to_panels(weight)
    others = [row for row in range(14) if row not in (5, 7)]
    spoilt = x.clone()
    spoilt[5] = float("nan")
    spoilt[7, 3] = float("inf")
    for multiply in (lambda rows: linear(rows, panels, None, 40), lambda rows: plain_linear(rows, weight, None)):
        actual = multiply(spoilt)
        assert actual[5].isnan().all()
        assert not actual[7].isfinite().any()
        assert torch.equal(actual[others], multiply(x)[others])


def test_wrong_arguments_are_refused() -> None:
    x, weight, _ = make(Case("", 2, 8, 8), torch.float32)
    panels = to_panels(weight)
    with pytest.raises(ValueError, match=r"want torch\.float32"):
        linear(x.double(), panels, None, 8)
    with pytest.raises(ValueError, match="are of no weight"):
        linear(x[:, :4], panels, None, 8)
    with pytest.raises(ValueError, match="bias is"):
        linear(x, panels, torch.zeros(7), 8)
    with pytest.raises(ValueError, match="bias is"):
        plain_linear(x, weight, torch.zeros(7))
    with pytest.raises(ValueError, match="must be contiguous"):
        plain_linear(x, weight.T, None)
    with pytest.raises(ValueError, match="x is"):
        plain_linear(x[:, :4], weight, None)
