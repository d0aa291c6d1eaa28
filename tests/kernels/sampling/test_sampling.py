"""kernels.sampling: what is drawn, and what the draw may depend on."""

from __future__ import annotations

import dataclasses
import hashlib

import pytest
import torch

from kernels import sampling
from kernels.sampling import SamplingRows, cpu, reference, rows_of, sample
from kernels.sampling.cases import CASES, Case, make_adjustments
from kernels.sampling.reference import gumbel


def make_rows(
    num_rows: int,
    *,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
    seeds: list[int] | None = None,
    position: int = 0,
) -> SamplingRows:
    seed = torch.tensor(seeds if seeds is not None else list(range(num_rows)))
    return rows_of(
        num_rows, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, seed=seed, position=position
    )


def make_logits(num_rows: int, vocab_size: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(num_rows, vocab_size, generator=torch.Generator().manual_seed(seed)) * 2


def splitmix64(state: int) -> int:
    mask = (1 << 64) - 1
    state = (state ^ (state >> 30)) * 0xBF58476D1CE4E5B9 & mask
    state = (state ^ (state >> 27)) * 0x94D049BB133111EB & mask
    return state ^ (state >> 31)


def test_noise_is_splitmix64_in_exact_arithmetic() -> None:
    """The tensor code equals Python's unbounded integers, for seeds that use the sign bit too."""
    golden, mask = 0x9E3779B97F4A7C15, (1 << 64) - 1
    for seed, position in ((0, 0), (1, 5), ((1 << 64) - 1, 2), (1 << 63, 1_000_000)):
        signed = seed - (1 << 64) if seed >= 1 << 63 else seed
        noise = gumbel(torch.tensor([signed]), torch.tensor([position]), torch.arange(4))[0]
        key = splitmix64((splitmix64((seed + golden) & mask) + (position + 1) * golden) & mask)
        for token_id in range(4):
            bits = splitmix64((key + (token_id + 1) * golden) & mask)
            uniform = torch.tensor(((bits >> 12) + 0.5) * 2.0**-52, dtype=torch.float64)
            torch.testing.assert_close(noise[token_id], -torch.log(-torch.log(uniform)), rtol=1e-14, atol=0)


def test_draws_stay_what_they_are_for_ever() -> None:
    """A client that keeps its seed keeps its text over releases and machines."""
    tokens = sample(make_logits(64, 97), make_rows(64, top_k=40, top_p=0.9, position=3))
    digest = hashlib.sha256(bytes(tokens.tolist())).hexdigest()
    assert digest[:16] == "1a5555ba608f7e4e"


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_draw_of_a_row_is_the_same_alone_and_in_any_batch(case: Case) -> None:
    logits = make_logits(case.num_rows, case.vocab_size)
    rows = make_rows(case.num_rows, temperature=0.8, top_p=0.95)
    together = sample(logits, rows)
    for row in range(min(case.num_rows, 4)):
        alone = rows_of(
            1, temperature=0.8, top_p=0.95, seed=rows.seed[row : row + 1], position=rows.position[row : row + 1]
        )
        assert sample(logits[row : row + 1], alone).item() == together[row].item()


@pytest.mark.parametrize("vocab_size", [1, 5, 700, 3 * cpu.TILE + 1])
@pytest.mark.parametrize("levels", [0, 6])
def test_cpu_draws_what_the_definition_draws(vocab_size: int, levels: int) -> None:
    """Row by row and tile by tile, with ties and without; adjusted and plain rows side by side."""
    limits = [
        (temperature, top_k, top_p, min_p)
        for temperature in (0.0, 0.4, 1.0, 40.0)
        for top_k in (0, 1, 90, 4000)
        for top_p in (0.2, 0.97, 1.0)
        for min_p in (0.0, 0.2)
    ][:: 1 if vocab_size < 1000 else 5]
    temperature, top_k, top_p, min_p = (torch.tensor(column) for column in zip(*limits, strict=True))
    order = torch.arange(len(limits))
    rows = rows_of(
        len(limits), temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, seed=order - 9, position=order % 7
    )
    logits = make_logits(len(limits), vocab_size).to(torch.bfloat16)
    if levels:
        logits = (logits * levels / 4).round() * 4 / levels
    adjustments = make_adjustments(len(limits), vocab_size)
    for some in (None, adjustments):
        assert torch.equal(cpu.sample(logits, rows, some), reference.sample(logits, rows, some))
    assert torch.equal(cpu.adjust(logits, adjustments), reference.adjust(logits, adjustments))
    assert torch.equal(cpu.sample(logits, None, adjustments), reference.sample(logits, None, adjustments))


def test_greedy_rows_are_argmax_whatever_their_neighbours() -> None:
    logits = make_logits(6, 50)
    rows = make_rows(6)
    rows.temperature[::2] = 0
    tokens = sample(logits, rows)
    assert torch.equal(tokens[::2], logits[::2].argmax(-1))
    assert torch.equal(sample(logits, None), logits.argmax(-1))


def test_top_k_one_and_tiny_top_p_are_argmax() -> None:
    logits = make_logits(16, 300)
    assert torch.equal(sample(logits, make_rows(16, top_k=1)), logits.argmax(-1))
    assert torch.equal(sample(logits, make_rows(16, top_p=1e-6)), logits.argmax(-1))
    assert torch.equal(sample(logits, make_rows(16, temperature=1e-30)), logits.argmax(-1))


def frequencies(logits: torch.Tensor, num_draws: int, **sampling: float) -> torch.Tensor:
    rows = make_rows(num_draws, **sampling)  # type: ignore[arg-type]  # ints and floats by name
    tokens = reference.sample(logits.expand(num_draws, -1), rows, None)
    return torch.bincount(tokens, minlength=logits.shape[0]).double() / num_draws


def test_frequencies_follow_the_softmax_of_what_is_kept() -> None:
    logits = torch.tensor([2.0, 1.0, 0.5, 0.0, -1.0, -3.0])
    num_draws = 40_000
    expected = (logits / 0.7).double().softmax(-1)
    assert (frequencies(logits, num_draws, temperature=0.7) - expected).abs().max() < 0.01
    kept = expected[:3] / expected[:3].sum()
    seen = frequencies(logits, num_draws, temperature=0.7, top_k=3)
    assert (seen[:3] - kept).abs().max() < 0.01 and seen[3:].sum() == 0


def test_top_p_keeps_the_smallest_set_that_reaches_it() -> None:
    logits = torch.tensor([0.4, 0.3, 0.2, 0.1]).log()
    for top_p, num_kept in ((0.39, 1), (0.41, 2), (0.69, 2), (0.71, 3), (0.91, 4), (1.0, 4)):
        seen = frequencies(logits, 2000, top_p=top_p)
        assert int((seen > 0).sum()) == num_kept, top_p


def test_top_p_counts_only_what_top_k_left() -> None:
    """Of {0.4, 0.3} the first has 0.57: a nucleus of 0.5 keeps it alone."""
    logits = torch.tensor([0.4, 0.3, 0.2, 0.1]).log()
    seen = frequencies(logits, 1000, top_p=0.5, top_k=2)
    assert seen.tolist() == [1.0, 0.0, 0.0, 0.0]


def test_equal_logits_are_kept_together() -> None:
    seen = frequencies(torch.tensor([1.0, 1.0, 1.0, -9.0]), 3000, top_k=1)
    assert (seen[:3] > 0.28).all() and seen[3] == 0


def test_other_seed_or_position_draws_anew() -> None:
    logits = make_logits(1, 1000).expand(50, -1) * 0.1
    assert len(set(sample(logits, make_rows(50)).tolist())) > 40
    by_position = [sample(logits[:1], make_rows(1, position=p)).item() for p in range(50)]
    assert len(set(by_position)) > 40


def test_bad_arguments_are_named() -> None:
    with pytest.raises(ValueError, match="logits is"):
        sample(torch.zeros(3), None)
    with pytest.raises(ValueError, match=r"seed is .* want torch.int64 \[2\]"):
        sample(torch.zeros(2, 5), make_rows(2, seeds=[1, 2, 3]))


def test_a_filter_that_no_compiled_code_knows_takes_the_definition(monkeypatch: pytest.MonkeyPatch) -> None:
    """So a new one works on every device from its definition alone; rows that do not use it stay with compiled code."""
    calls = []
    original = reference.sample

    def spy(*arguments: object) -> torch.Tensor:
        calls.append(arguments)
        return original(*arguments)  # type: ignore[arg-type]  # passes on what it is given

    monkeypatch.setattr(reference, "sample", spy)
    logits, rows = make_logits(3, 100), make_rows(3, min_p=0.1)
    expected = sample(logits, rows)
    assert not calls
    monkeypatch.setattr(sampling, "COMPILED_FILTERS", frozenset({"top_k", "top_p"}))
    assert torch.equal(sample(logits, rows), expected) and len(calls) == 1
    sample(logits, dataclasses.replace(rows, has_min_p=False))
    assert len(calls) == 1
