"""The Triton sampler against its definition: the same tokens, the same adjusted logits, ranks and normalisers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings, strategies as st

from kernels.cases import to_device
from kernels.sampling import DRAW_PARAMETERS, SamplingRows, reference, rows_of, sample, triton_kernel, triton_logprobs
from kernels.sampling.cases import make_adjustments
from kernels.sampling.launch import SampleLaunch
from kernels.sampling.logprobs import normalise
from kernels.sampling.triton_adjust import adjust

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
PARTS = {"parameters": SampleLaunch(256, 128)}  # several parts and tiles in a row of few tokens
PART = {"parameters": SampleLaunch(256, 256)}


def make_rows(settings_of_rows: Sequence[tuple[float, int, float, float]]) -> SamplingRows:
    """Rows by (temperature, top_k, top_p, min_p)."""
    count = len(settings_of_rows)
    temperature, top_k, top_p, min_p = torch.tensor(settings_of_rows, dtype=torch.float64).T
    limits = {"top_k": top_k} if top_k.any() else {}
    limits |= {"top_p": top_p} if (top_p < 1).any() else {}
    limits |= {"min_p": min_p} if min_p.any() else {}
    order = torch.arange(count)
    return rows_of(count, temperature=temperature, seed=order - count // 2, position=order * 3, **limits)


def make_logits(num_rows: int, vocab_size: int, *, seed: int = 0, levels: int = 0) -> torch.Tensor:
    """Normal logits, or many equal ones on so many levels."""
    logits = torch.randn(num_rows, vocab_size, generator=torch.Generator().manual_seed(seed)) * 3
    return (logits * levels / 6).round() / levels if levels else logits


MIXED = ((0.0, 3, 0.5, 0.1), (1.0, 0, 1.0, 0.0), (0.7, 20, 0.8, 0.01), (30.0, 7, 1.0, 0.0), (1.3, 0, 0.6, 0.0))


def test_mixed_rows_draw_what_the_definition_draws() -> None:
    logits, rows = make_logits(5, 301), make_rows(MIXED)
    adjustments = make_adjustments(5, 301)
    expected = reference.sample(logits, rows, adjustments)
    assert not torch.equal(expected, reference.sample(logits, rows, None)), "the adjustments decide nothing"
    actual = triton_kernel.sample(logits.to(DEVICE), to_device(rows, DEVICE), to_device(adjustments, DEVICE), **PARTS)
    assert torch.equal(actual.cpu(), expected)


@pytest.mark.parametrize("limited", [[2, 3, 4], [0, 1, 2, 3, 4], None], ids=str)
def test_rows_without_a_limit_draw_the_same_beside_those_that_have_one(limited: list[int] | None) -> None:
    """Rows that are named and have none change nothing."""
    logits, rows = make_logits(5, 301), make_rows(MIXED)
    expected = reference.sample(logits, rows, None)
    named = None if limited is None else torch.tensor(limited)
    actual = triton_kernel.sample(logits.to(DEVICE), to_device(replace(rows, limited=named), DEVICE), None, **PARTS)
    assert torch.equal(actual.cpu(), expected)


@settings(max_examples=6)
@given(
    vocab_size=st.sampled_from([1, 2, 63, 130, 200]),
    levels=st.sampled_from([0, 3]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
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
    actual = triton_kernel.sample(logits.to(DEVICE), to_device(rows, DEVICE), None, **PART)
    assert torch.equal(actual.cpu(), reference.sample(logits, rows, None))


def test_greedy_takes_the_first_of_equal_logits() -> None:
    logits = torch.tensor([[0.0, -0.0, 5.0] + [1.0] * 200 + [5.0], [-3.0] * 204])
    adjustments = replace(make_adjustments(2, 204), bias_row=torch.tensor([0, 0]), bias_token=torch.tensor([0, 203]))
    adjustments = replace(adjustments, bias=torch.tensor([5.0, -1.0]), history_row=torch.tensor([-1]))
    actual = triton_kernel.sample(logits.to(DEVICE), None, to_device(adjustments, DEVICE), **PART)
    assert actual.tolist() == [0, 0]
    greedy = to_device(make_rows([(0.0, 0, 1.0, 0.0)] * 2), DEVICE)
    assert triton_kernel.sample(logits.to(DEVICE), greedy, None, **PART).tolist() == [2, 0]


def test_adjusted_logits_are_the_definitions_bit_for_bit() -> None:
    """Every element is written, whatever the strides of the logits; bfloat16 is widened first."""
    wide = make_logits(7, 601).to(torch.bfloat16)
    logits = wide[:, ::3]
    adjustments = make_adjustments(7, logits.shape[1])
    moved = wide.to(DEVICE)[:, ::3]
    assert torch.equal(adjust(moved, to_device(adjustments, DEVICE)).cpu(), reference.adjust(logits, adjustments))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_ranks_and_normalisers(dtype: torch.dtype) -> None:
    logits = make_logits(3, 5003, levels=4).to(dtype)
    tokens = torch.tensor([5002, 0, 77])
    expected, rank = normalise(logits, tokens)
    actual, actual_rank = triton_logprobs.normalise(logits.to(DEVICE), tokens.to(DEVICE))
    torch.testing.assert_close(actual.cpu(), expected, rtol=1e-6, atol=1e-5)
    assert torch.equal(actual_rank.cpu(), rank)


def test_offsets_beyond_two_to_the_31_by_stride() -> None:
    """Rows 2^30 elements apart in one storage of which only the rows are touched."""
    storage = torch.empty(3 * 2**30 + 64, dtype=torch.bfloat16, device=DEVICE)
    logits = storage.as_strided((4, 64), (2**30, 1))
    logits.copy_(make_logits(4, 64))
    rows = make_rows([(1.0, 9, 0.9, 0.0)] * 4)
    expected = reference.sample(logits.cpu().contiguous(), rows, None)
    assert torch.equal(triton_kernel.sample(logits, to_device(rows, DEVICE), None, **PART).cpu(), expected)
    assert torch.equal(sample(logits, to_device(rows, DEVICE)).cpu(), expected)


def test_a_row_draws_the_same_in_any_batch() -> None:
    logits, rows = make_logits(5, 150), make_rows(MIXED)
    together = triton_kernel.sample(logits.to(DEVICE), to_device(rows, DEVICE), None, **PART)
    kept = torch.tensor([3, 2])
    tensors = {name: getattr(rows, name) for name in ("position", *DRAW_PARAMETERS)}
    some = rows_of(len(kept), **{name: tensor[kept] for name, tensor in tensors.items()})  # flags: all searched
    assert torch.equal(
        triton_kernel.sample(logits[kept].to(DEVICE), to_device(some, DEVICE), None, **PART), together[kept]
    )


@pytest.mark.parametrize("limits", [(0, 1.0, 0.0), (5, 0.9, 0.0)], ids=["one pass", "limits"])
@pytest.mark.parametrize("is_adjusted", [False, True])
def test_rows_that_are_not_finite_are_found_and_change_no_other(
    limits: tuple[int, float, float], is_adjusted: bool
) -> None:
    """Rows 1, 2 and 4 hold NaN, an infinity and its opposite; adjustments ban tokens, which is not a fault."""
    logits, rows = make_logits(5, 301), make_rows([(0.0, *limits), *[(0.8, *limits)] * 4])
    adjustments = make_adjustments(5, 301) if is_adjusted else None
    expected = reference.sample(logits, rows, adjustments)
    for row, value in ((1, float("nan")), (2, float("inf")), (4, float("-inf"))):
        logits[row, 290] = value
    tokens, is_finite = triton_kernel.sample_and_check(
        logits.to(DEVICE), to_device(rows, DEVICE), to_device(adjustments, DEVICE) if adjustments else None, **PARTS
    )
    assert is_finite.tolist() == [True, False, False, True, False]
    assert torch.equal(tokens[is_finite].cpu(), expected[is_finite.cpu()])
    assert ((tokens >= 0) & (tokens < 301)).all()


@pytest.mark.parametrize("temperature", [1e-30, 0.7, 1e4])
def test_one_pass_draws_among_equal_logits_what_the_definition_draws(temperature: float) -> None:
    """Several parts whose highest logits are equal: the noise decides, whatever the temperature."""
    logits, rows = make_logits(6, 900, levels=2), make_rows([(temperature, 0, 1.0, 0.0)] * 6)
    drawn = triton_kernel.sample(logits.to(DEVICE), to_device(rows, DEVICE), None, **PARTS).cpu()
    assert torch.equal(drawn, reference.sample(logits, rows, None))
    assert not torch.equal(drawn, logits.argmax(dim=1))


def test_all_rows_greedy_in_one_pass() -> None:
    logits = make_logits(4, 700, levels=2)
    tokens, is_finite = triton_kernel.sample_and_check(logits.to(DEVICE), None, None, **PARTS)
    assert torch.equal(tokens.cpu(), logits.argmax(dim=1))
    assert is_finite.all()
