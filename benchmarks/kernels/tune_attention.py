"""The tuner's problems for attention: one bucket for each shape of heads, whose launches serve every batch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import product
from typing import Any

import torch

from benchmarks.kernels.problem import Problem
from kernels.paged_attention import reference, triton_kernel
from kernels.paged_attention.cases import Case, Inputs, make_one_hot
from kernels.paged_attention.launch import DecodeLaunch, PrefillLaunch, Sizes

BLOCK_SIZE = 16
DECODES = [
    DecodeLaunch(block_m, block_n, num_warps, num_stages, split_keys)
    for block_m, block_n, num_warps, num_stages, split_keys in product(
        (16, 32), (32, 64, 128), (2, 4, 8), (2, 3, 4, 5), (256, 512, 1024)
    )
]
PREFILLS = [PrefillLaunch(*values) for values in product((64, 128), (32, 64, 128), (4, 8), (1, 3))]


@dataclass(frozen=True, slots=True)
class Shape:
    """One model's attention."""

    num_heads: int
    num_kv_heads: int
    dim: int
    cache: str = "as query"  # or "fp8"


def shapes(is_short: bool) -> Iterator[Shape]:
    """Llama 8B and 70B, Qwen 2.5 7B, Gemma 2, and heads without groups; the first also with FP8 keys and values."""
    every = ((32, 8, 128), (64, 8, 128), (28, 4, 128), (16, 8, 256), (32, 32, 128), (32, 8, 64))
    for heads in every[:1] if is_short else every:
        yield Shape(*heads)
        yield Shape(*heads, "fp8")


def decode_problems(device: torch.device, dtype: torch.dtype, is_short: bool) -> Iterator[Problem]:
    """Every bucket of decode, at 64 sequences of about 1k tokens."""
    for shape in shapes(is_short):
        yield decode_problem(shape, tuple((1, 960 + 2 * n) for n in range(64)), device, dtype)


def prefill_problems(device: torch.device, dtype: torch.dtype, is_short: bool) -> Iterator[Problem]:
    """Every bucket of prefill, at a chunk of 1k tokens after 1k and one without a prefix."""
    for shape in shapes(is_short):
        yield prefill_problem(shape, ((1024, 2048), (1000, 1000)), device, dtype)


def decode_problem(
    shape: Shape, sequences: tuple[tuple[int, int], ...], device: torch.device, dtype: torch.dtype
) -> Problem:
    """One bucket of decode. Sequences are (queries, keys), of one query each."""
    inputs = _exact(shape, sequences, dtype)
    sizes = Sizes.of(inputs.query, inputs.key_cache, inputs.value_cache)
    return _problem(inputs, "decode", asdict(sizes), DecodeLaunch.default(sizes), DECODES, device)


def prefill_problem(
    shape: Shape, sequences: tuple[tuple[int, int], ...], device: torch.device, dtype: torch.dtype
) -> Problem:
    """One bucket of prefill. Sequences are (queries, keys), of several queries each."""
    inputs = _exact(shape, sequences, dtype)
    sizes = Sizes.of(inputs.query, inputs.key_cache, inputs.value_cache)
    return _problem(inputs, "prefill", asdict(sizes), PrefillLaunch.default(sizes), PREFILLS, device)


def _exact(shape: Shape, sequences: tuple[tuple[int, int], ...], dtype: torch.dtype) -> Inputs:
    dims = (shape.dim, shape.dim, BLOCK_SIZE)
    return make_one_hot(Case("tune", sequences, shape.num_heads, shape.num_kv_heads, *dims, cache=shape.cache), dtype)


def _problem(
    inputs: Inputs, kind: str, sizes: dict[str, Any], default: Any, candidates: list[Any], device: torch.device
) -> Problem:
    expected = reference.paged_attention(
        inputs.query, inputs.key_cache, inputs.value_cache, inputs.batch, inputs.options
    )
    there = inputs.to(device)

    def run(launch: Any) -> torch.Tensor:
        return triton_kernel.paged_attention(
            there.query, there.key_cache, there.value_cache, there.batch, there.options, **{kind: launch}
        )

    return Problem(sizes, default, candidates, lambda launch: torch.equal(run(launch).cpu(), expected), run)
