"""The tuner's problems for sampling: rows that draw under top-k, top-p and min-p, by number and vocabulary."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from itertools import product

import torch

from benchmarks.kernels.problem import Problem
from kernels.cases import to_device
from kernels.sampling import rows_of, sample, triton_kernel
from kernels.sampling.launch import SampleLaunch, Sizes

CANDIDATES = [
    SampleLaunch(*values) for values in product((1024, 2048, 4096, 8192, 16384), (512, 1024), (4, 8), (4, 8, 16))
]


def shapes(is_short: bool) -> Iterator[tuple[int, int]]:
    """(rows, vocabulary) of Llama 3, Qwen and Llama 2."""
    for vocab in (128_256,) if is_short else (128_256, 151_936, 32_000):
        for num_rows in (64,) if is_short else (1, 16, 64, 256):
            yield num_rows, vocab


def problems(device: torch.device, dtype: torch.dtype, is_short: bool) -> Iterator[Problem]:
    """Every bucket; 151 936 tokens are in the one of 262 144."""
    for num_rows, vocab in shapes(is_short):
        yield problem(num_rows, vocab, device, dtype)


def problem(num_rows: int, vocab: int, device: torch.device, dtype: torch.dtype) -> Problem:
    """One bucket; right is who draws the tokens that the CPU draws."""
    logits = (3 * torch.randn(num_rows, vocab, generator=torch.Generator().manual_seed(0))).to(dtype)
    order = torch.arange(num_rows)
    rows = rows_of(num_rows, temperature=0.8, top_k=50, top_p=0.95, min_p=0.01, seed=order, position=order * 7)
    expected = sample(logits, rows, None)
    there, rows_there = logits.to(device), to_device(rows, device)

    def run(launch: SampleLaunch) -> torch.Tensor:
        return triton_kernel.sample(there, rows_there, None, parameters=launch)

    return Problem(
        asdict(Sizes.of(logits)),
        SampleLaunch(),
        CANDIDATES,
        lambda launch: torch.equal(run(launch).cpu(), expected),
        run,
    )
