"""Sampling in native code: the definition's tokens, and whether rows are finite."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings, strategies as st

from kernels.sampling import DRAW_PARAMETERS, SamplingRows, native, reference, rows_of, sample_and_check
from kernels.sampling.cases import make_adjustments
from tests.kernels.threads import in_threads

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
VOCABULARIES = [1, 2, 31, 700, native.PART, native.PART + 1, 3 * native.PART + 70]
LIMITS = [
    (temperature, top_k, top_p, min_p)
    for temperature in (0.0, 0.4, 1.0, 40.0)
    for top_k in (0, 1, 90, 4000)
    for top_p in (0.2, 0.97, 1.0)
    for min_p in (0.0, 0.2)
]


def make_rows(limits: list[tuple[float, int, float, float]]) -> SamplingRows:
    """Rows by (temperature, top_k, top_p, min_p)."""
    order = torch.arange(len(limits))
    temperature, top_k, top_p, min_p = (torch.tensor(column) for column in zip(*limits, strict=True))
    return rows_of(
        len(limits),
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        seed=order * 12345 - 9,
        position=order % 7,
    )


def make_logits(num_rows: int, vocab_size: int, *, seed: int = 0, levels: int = 0) -> torch.Tensor:
    """Normal logits, or many equal ones on so many levels."""
    logits = torch.randn(num_rows, vocab_size, generator=torch.Generator().manual_seed(seed)) * 3
    return (logits * levels / 6).round() / levels if levels else logits


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("levels", [0, 1])
@pytest.mark.parametrize("vocab_size", VOCABULARIES)
def test_greedy_tokens_are_the_first_of_the_largest(vocab_size: int, levels: int, dtype: torch.dtype) -> None:
    logits = make_logits(5, vocab_size, levels=levels).to(dtype)
    assert native.can_serve(logits)
    tokens, is_finite = native.sample(logits, None, None)
    assert torch.equal(tokens, logits.argmax(-1))
    assert is_finite.all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("vocab_size", VOCABULARIES)
def test_the_largest_is_found_wherever_it_stands(vocab_size: int, dtype: torch.dtype) -> None:
    """Among equal negative numbers and zeros of both signs; in column slices too."""
    places = sorted({0, vocab_size // 2, vocab_size - 1, max(vocab_size - 40, 0)})
    wide = torch.full((len(places), vocab_size + 3), 9.0, dtype=dtype)
    logits = wide[:, 1 : vocab_size + 1]
    logits[:] = -3.5
    for row, place in enumerate(places):
        logits[row, place] = -0.0
        logits[row, place + 1 :] = 0.0
    assert native.sample(logits, None, None)[0].tolist() == places


@pytest.mark.parametrize("share", [0.0, 0.5, 0.9999, 1.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("temperature", [1e-6, 0.02, 0.4, 1.0, 40.0, 1e6])
def test_tokens_that_no_noise_can_lift_change_nothing(temperature: float, dtype: torch.dtype, share: float) -> None:
    """Some are far below the others, as forbidden tokens are, or all of them; of the others some are nearly so."""
    generator = torch.Generator().manual_seed(4)
    logits = make_logits(40, native.PART + 70, seed=3) * 10
    is_low = torch.rand(logits.shape, generator=generator) < share
    logits = logits.masked_fill(is_low, -1e30).to(dtype)
    rows = make_rows([(temperature, 0, 1.0, 0.0)] * len(logits))
    assert torch.equal(native.sample(logits, rows, None)[0], reference.sample(logits, rows, None))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rows_that_are_not_finite_are_reported_and_spoil_no_other(dtype: torch.dtype, value: float) -> None:
    vocab_size = native.PART + 45
    limits = [(0.0, 0, 1.0, 0.0), (0.8, 0, 0.9, 0.0), (1.0, 5, 1.0, 0.1)] * 2
    logits, rows = make_logits(6, vocab_size).to(dtype), make_rows(limits)
    expected, _ = native.sample(logits, rows, None)
    for row, place in ((1, 0), (3, 16_000), (5, vocab_size - 1)):
        logits[row, place] = value
    tokens, is_finite = native.sample(logits, rows, None)
    assert is_finite.tolist() == [True, False] * 3
    assert torch.equal(tokens[::2], expected[::2])
    assert not tokens[1::2].any()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("levels", [0, 6])
@pytest.mark.parametrize("vocab_size", [1, 5, 700, 2 * native.PART + 1])
def test_draws_are_those_of_the_definition(vocab_size: int, levels: int, dtype: torch.dtype) -> None:
    """With ties and without; adjusted and plain, greedy and drawn rows side by side."""
    limits = LIMITS[:: 1 if vocab_size < 1000 else 7]
    rows = make_rows(limits)
    logits = make_logits(len(limits), vocab_size, levels=levels).to(dtype)
    adjustments = make_adjustments(len(limits), vocab_size)
    for how in (None, rows):
        for changes in (None, adjustments):
            tokens, is_finite = native.sample(logits, how, changes)
            assert torch.equal(tokens, reference.sample(logits, how, changes))
            assert is_finite.all()
    assert torch.equal(native.adjust(logits, adjustments), reference.adjust(logits, adjustments))


@settings(max_examples=60)
@given(
    vocab_size=st.sampled_from([1, 2, 63, 130, 1500]),
    levels=st.sampled_from([0, 3]),
    dtype=st.sampled_from(DTYPES),
    row=st.tuples(
        st.sampled_from([1e-30, 0.3, 1.0, 50.0]),
        st.sampled_from([0, 1, 2, 60, 300]),
        st.sampled_from([1e-7, 0.3, 0.9, 1 - 2**-24, 1.0]),
        st.sampled_from([0.0, 0.1, 1.0]),
    ),
    seed=st.integers(0, 2**31),
)
def test_random_rows(
    vocab_size: int, levels: int, dtype: torch.dtype, row: tuple[float, int, float, float], seed: int
) -> None:
    logits, rows = make_logits(2, vocab_size, seed=seed, levels=levels).to(dtype), make_rows([row] * 2)
    rows = replace(rows, seed=rows.seed + seed)
    assert torch.equal(native.sample(logits, rows, None)[0], reference.sample(logits, rows, None))


def test_many_draws_are_those_of_the_definition() -> None:
    """Noise and scores decide each of them; 1,100,000 such draws were compared once, and none differed."""
    count = 20_000
    generator = torch.Generator().manual_seed(5)
    rows = rows_of(
        count,
        temperature=torch.rand(count, generator=generator) * 1.5 + 0.2,
        top_k=torch.randint(0, 60, (count,), generator=generator),
        top_p=torch.rand(count, generator=generator) * 0.5 + 0.5,
        min_p=torch.rand(count, generator=generator) * 0.05,
        seed=torch.randint(-(1 << 62), 1 << 62, (count,), generator=generator),
        position=torch.randint(0, 5000, (count,), generator=generator),
    )
    plain = replace(rows, top_k=torch.zeros_like(rows.top_k), top_p=torch.ones(count), min_p=torch.zeros(count))
    logits = make_logits(count, 90)
    for how in (rows, plain):
        assert torch.equal(native.sample(logits, how, None)[0], reference.sample(logits, how, None))


def test_tokens_do_not_depend_on_the_threads_or_the_batch() -> None:
    vocab_size = 2 * native.PART + 9
    rows = make_rows(LIMITS[::5])
    logits = make_logits(len(rows.seed), vocab_size).bfloat16()
    adjustments = make_adjustments(len(rows.seed), vocab_size)
    one, *others = in_threads(lambda: native.sample(logits, rows, adjustments)[0])
    assert all(torch.equal(other, one) for other in others)
    plain, _ = native.sample(logits, rows, None)
    names = {"position", *DRAW_PARAMETERS}
    for row in (0, 7, 13):
        tensors = {name: getattr(rows, name)[row : row + 1] for name in names}
        assert native.sample(logits[row : row + 1], SamplingRows(**tensors), None)[0].item() == plain[row].item()


def test_limits_that_no_row_has_need_not_be_searched_for() -> None:
    rows = make_rows([(0.7, 0, 1.0, 0.1)] * 8)
    logits = make_logits(8, 500)
    unfiltered = replace(rows, has_top_k=False, has_top_p=False)
    assert torch.equal(native.sample(logits, unfiltered, None)[0], native.sample(logits, rows, None)[0])


def test_without_native_code_the_same_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = make_rows(LIMITS[::3])
    logits = make_logits(len(rows.seed), 300)
    logits[4, 7] = float("nan")
    adjustments = make_adjustments(len(rows.seed), 300)
    ours = [sample_and_check(logits, how, changes) for how in (None, rows) for changes in (None, adjustments)]
    monkeypatch.setattr(native, "can_serve", lambda logits: False)
    torchs = [sample_and_check(logits, how, changes) for how in (None, rows) for changes in (None, adjustments)]
    for (tokens, is_finite), (other_tokens, is_other_finite) in zip(ours, torchs, strict=True):
        assert is_finite.tolist() == is_other_finite.tolist() == [row != 4 for row in range(len(logits))]
        assert torch.equal(tokens[is_finite], other_tokens[is_finite])


def test_what_the_ops_do_not_serve_is_left_to_torch() -> None:
    assert not native.can_serve(torch.zeros(2, 3, dtype=torch.float64))
    assert not native.can_serve(torch.zeros(3, 2).t())
    logits = make_logits(9, 4).t()
    tokens, is_finite = sample_and_check(logits, None)
    assert torch.equal(tokens, logits.argmax(-1)) and is_finite.all()
