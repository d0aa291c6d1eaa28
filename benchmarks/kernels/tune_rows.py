"""The tuner's problems for ops on the rows of a step.

Sampling: rows that draw under top-k, top-p and min-p, by number and vocabulary. Products of a few rows: with the fused
linears of an 8B Llama and its head.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from itertools import product

import torch

from benchmarks.kernels.problem import Problem
from kernels.cases import to_device
from kernels.linear import triton_rows
from kernels.linear.rows_launch import RowsLaunch, Sizes as LinearSizes
from kernels.sampling import rows_of, sample, triton_kernel
from kernels.sampling.launch import SampleLaunch, Sizes

SAMPLES = [
    SampleLaunch(*values) for values in product((1024, 2048, 4096, 8192, 16384), (512, 1024), (4, 8), (4, 8, 16))
]
LINEARS = (  # outputs of a tile, inputs of a step, programs of a multiprocessor
    (64, 128, 2),
    (64, 256, 1),
    (128, 128, 1),
    (32, 128, 2),
    (32, 256, 1),
    (32, 256, 2),
)


def sample_shapes(is_short: bool) -> Iterator[tuple[int, int]]:
    """(rows, vocabulary) of Llama 3, Qwen and Llama 2."""
    for vocab in (128_256,) if is_short else (128_256, 151_936, 32_000):
        for num_rows in (64,) if is_short else (1, 16, 64, 256):
            yield num_rows, vocab


def sample_problems(device: torch.device, dtype: torch.dtype, is_short: bool) -> Iterator[Problem]:
    """Every bucket; 151 936 tokens are in the one of 262 144."""
    for num_rows, vocab in sample_shapes(is_short):
        yield sample_problem(num_rows, vocab, device, dtype)


def sample_problem(num_rows: int, vocab: int, device: torch.device, dtype: torch.dtype) -> Problem:
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
        SAMPLES,
        lambda launch: torch.equal(run(launch).cpu(), expected),
        run,
    )


def linear_shapes(is_short: bool) -> Iterator[tuple[int, int]]:
    """(inputs, outputs) of gate and up, down, and the head. By default q k v and o are torch's."""
    yield from ((4096, 28672), (14336, 4096))
    if not is_short:
        yield 4096, 128_256


def linear_problems(device: torch.device, dtype: torch.dtype, is_short: bool) -> Iterator[Problem]:
    """Every bucket."""
    for num_in, num_out in linear_shapes(is_short):
        yield linear_problem(num_in, num_out, device, dtype)


def linear_problem(num_in: int, num_out: int, device: torch.device, dtype: torch.dtype) -> Problem:
    """One bucket, timed with the most rows that the default takes: a launch may not follow the rows of a step.

    Inputs are small integers, most of a row zero, so that every sum is exact.
    """
    sizes = LinearSizes(str(dtype).removeprefix("torch."), num_in, num_out)
    default = RowsLaunch.default(sizes)
    generator = torch.Generator(device).manual_seed(0)
    x, weight = (
        torch.randint(-1, 2, (count, num_in), generator=generator, device=device).to(dtype)
        for count in (default.most_rows, num_out)
    )
    x[:, 128:] *= torch.arange(num_in - 128, device=device) % 64 == 0  # sums that the dtype holds
    expected = torch.cat([x.float() @ part.float().T for part in torch.split(weight, 1 << 14)], dim=1).to(dtype)

    def run(launch: RowsLaunch) -> torch.Tensor:
        return triton_rows.rows_linear(x, weight, None, launch)

    candidates = [RowsLaunch(*tiles, most_rows=default.most_rows) for tiles in LINEARS]
    return Problem(asdict(sizes), default, candidates, lambda launch: torch.equal(run(launch), expected), run)
