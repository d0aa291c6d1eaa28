"""What launches are refused and chosen, and that the tuner's problems tell right from wrong."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.kernels.tune import PROBLEMS
from benchmarks.kernels.tune_attention import Shape, decode_problem, prefill_problem, shapes
from kernels.paged_attention import triton_kernel
from kernels.paged_attention.launch import DecodeLaunch, PrefillLaunch, Sizes, decode_launch, prefill_launch
from kernels.tuning import read_tables, write_table

CPU = torch.device("cpu")
LLAMA = Sizes("bfloat16", "bfloat16", 128, 4)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: DecodeLaunch(8, 64), "block_m is 8, want a power of two from 16 to 32"),
        (lambda: DecodeLaunch(64, 64), "block_m is 64"),
        (lambda: DecodeLaunch(16, 48), "block_n is 48"),
        (lambda: DecodeLaunch(16, 64, 3), "num_warps is 3"),
        (lambda: DecodeLaunch(16, 64, 4, 0), "num_stages is 0, want 1 to 8"),
        (lambda: DecodeLaunch(16, 64, split_keys=96), "split_keys is 96, want a multiple of block_n, 64"),
        (lambda: DecodeLaunch(16, 64, units=3), "units is 3, want a power of two from 1 to 16"),
        (lambda: PrefillLaunch(64, 512), "block_n is 512"),
        (lambda: PrefillLaunch(64, 64, num_stages=9), "num_stages is 9, want 1 to 8"),
    ],
)
def test_launches_that_cannot_run_are_refused(make: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


def test_a_table_replaces_the_defaults_of_its_model_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bucket = "cache=bfloat16 dim=128 dtype=bfloat16 group=4"
    write_table("paged_attention_decode", "A GPU", {}, {bucket: {"num_stages": 4, "split_keys": 256}}, tmp_path)
    write_table("paged_attention_prefill", "A GPU", {}, {bucket: {"block_m": 64}}, tmp_path)
    assert set(read_tables("A GPU", tmp_path)) <= set(PROBLEMS)
    monkeypatch.setattr("kernels.tuning.TABLES", tmp_path)
    for cached in (decode_launch, prefill_launch):
        cached.cache_clear()
    assert decode_launch("A GPU", LLAMA) == DecodeLaunch(16, 64, num_stages=4, split_keys=256)
    assert prefill_launch("A GPU", LLAMA) == PrefillLaunch(64, 64, 8)
    other = Sizes("bfloat16", "float8_e4m3fn", 128, 4)
    assert decode_launch("A GPU", other) == decode_launch(None, other) == DecodeLaunch(16, 64)
    for cached in (decode_launch, prefill_launch):
        cached.cache_clear()


@pytest.mark.parametrize("cache", ["as query", "fp8"])
def test_the_tuner_checks_attention_bit_for_bit(cache: str, monkeypatch: pytest.MonkeyPatch) -> None:
    shape = Shape(4, 2, 16, cache)
    problems = [
        decode_problem(shape, ((1, 40), (1, 7)), CPU, torch.bfloat16),
        prefill_problem(shape, ((5, 20),), CPU, torch.bfloat16),
    ]
    for problem, other in zip(problems, (DecodeLaunch(32, 32, split_keys=32), PrefillLaunch(16, 32)), strict=True):
        assert problem.sizes["group"] == 2
        assert problem.is_right(problem.default)
        assert problem.is_right(other)
    right = triton_kernel.paged_attention
    monkeypatch.setattr(triton_kernel, "paged_attention", lambda *a, **b: right(*a, **b).add_(1))
    assert not any(problem.is_right(problem.default) for problem in problems)


def test_every_bucket_is_searched_once() -> None:
    for is_short in (True, False):
        every = list(shapes(is_short))
        assert len(every) == len(set(every)) >= 2
