"""Attention and the KV write on the GPU against their definitions on the CPU, over the same cases as the CPU tests."""

from __future__ import annotations

import contextlib
from operator import attrgetter

import pytest
import torch
from triton.runtime.errors import OutOfResources

from benchmarks.kernels.tune_attention import Shape, decode_problem, prefill_problem
from kernels.paged_attention import AttentionBatch, encoder_attention, reference, triton_kernel
from kernels.paged_attention.cases import ALL_CASES, Case, Inputs, make, make_one_hot
from kernels.paged_attention.options import Options
from kernels.store_kv import cases as store_cases, reference as store_reference, store_kv
from tests.kernels.tolerances import assert_close

pytestmark = pytest.mark.gpu

DTYPES = (torch.float32, torch.bfloat16)
# Every option is compiled anew, at about a second each: float32 is for one case of each kind.
FLOAT32 = ("mixed", "ALiBi, window, soft cap, sinks", "odd sizes", "cross, GQA, soft cap", "sparse, FP8")
CUDA = torch.device("cuda")
case_name = attrgetter("name")


def define(inputs: Inputs) -> torch.Tensor:
    return reference.paged_attention(inputs.query, inputs.key_cache, inputs.value_cache, inputs.batch, inputs.options)


def run(inputs: Inputs) -> torch.Tensor:
    """With the launch parameters that are used."""
    there = inputs.to(CUDA)
    assert triton_kernel.can_serve(there.key_cache, there.value_cache)
    return triton_kernel.paged_attention(
        there.query, there.key_cache, there.value_cache, there.batch, there.options
    ).cpu()


@pytest.mark.parametrize("case", ALL_CASES, ids=case_name)
def test_attention(case: Case) -> None:
    inputs = make(case, torch.bfloat16)
    assert_close(run(inputs), define(inputs))


@pytest.mark.parametrize("case", [case for case in ALL_CASES if case.name in FLOAT32], ids=case_name)
def test_attention_in_float32(case: Case) -> None:
    inputs = make(case, torch.float32)
    assert_close(run(inputs), define(inputs))


@pytest.mark.parametrize("cache", ["as query", "fp8"])
@pytest.mark.parametrize(("num_heads", "dim"), [(2, 64), (8, 128), (14, 80), (2, 256), (64, 64)])
def test_one_key_takes_all_weight_bit_for_bit(num_heads: int, dim: int, cache: str) -> None:
    """Integers: what a miscompiled product would get wrong. In bfloat16, which runs on the tensor cores."""
    sequences = ((1, 40), (1, 1500), (200, 300), (150, 150), (3, 90))
    inputs = make_one_hot(Case("one hot", sequences, num_heads, 2, dim, dim, cache=cache), torch.bfloat16)
    assert torch.equal(run(inputs), define(inputs))


@pytest.mark.parametrize("cache", ["as query", "fp8_per_token_head"])
def test_a_row_has_the_same_bits_in_every_batch(cache: str) -> None:
    """Alone its splits are computed by units, among 200 others mostly whole."""
    lens = [1024, 37, 129, 1100, 513, 2999, 1, 65, *range(700, 1300, 3)]
    inputs = make(Case("decodes", tuple((1, n) for n in lens), 32, 8, 128, 128, cache=cache), torch.bfloat16).to(CUDA)

    def of_rows(rows: list[int]) -> torch.Tensor:
        batch = AttentionBatch.build(inputs.batch.block_tables[rows], range(len(rows) + 1), [lens[row] for row in rows])
        query = inputs.query[rows].contiguous()
        return triton_kernel.paged_attention(query, inputs.key_cache, inputs.value_cache, batch, inputs.options)

    together = of_rows(list(range(len(lens))))
    for rows in ([0], [1], [2], [3], [4], [5], [6], [7], [5, 0, 3], list(range(0, len(lens), 5))):
        assert torch.equal(of_rows(rows), together[rows]), rows


def test_launches_of_the_tuner_have_the_bits_of_the_definition() -> None:
    """Every fifth of prefill and every 19th of decode, which have each of their tiles and stages; the tuner checks each
    that it times, and passes over those that take more shared memory than there is."""
    shape = Shape(8, 2, 128)
    for problem, step in (
        (decode_problem(shape, ((1, 40), (1, 1500), (1, 513)), CUDA, torch.bfloat16), 19),
        (prefill_problem(shape, ((200, 300), (150, 150), (3, 90)), CUDA, torch.bfloat16), 5),
    ):
        tried = problem.candidates[::step]
        ran = 0
        for launch in tried:
            with contextlib.suppress(OutOfResources):
                assert problem.is_right(launch), launch
                ran += 1
        assert ran >= len(tried) / 2


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_encoder_attention(dtype: torch.dtype) -> None:
    batch = AttentionBatch.ragged([3, 1, 0, 500])
    query, key, value = torch.randn(504, 6, 64, generator=torch.Generator().manual_seed(2)).to(dtype).split(2, dim=1)
    expected = define(Inputs(query, key.unsqueeze(1), value.unsqueeze(1), batch, Options(0.125)))
    actual = encoder_attention(query.to(CUDA), key.to(CUDA), value.to(CUDA), batch, scale=0.125)
    assert_close(actual.cpu(), expected)


@pytest.mark.parametrize("has_token_scales", [False, True])
@pytest.mark.parametrize("case", store_cases.CASES, ids=case_name)
def test_store_kv_as_fp8(case: store_cases.Case, *, has_token_scales: bool) -> None:
    key, value, slots = store_cases.make(case, torch.bfloat16)
    here = store_cases.make_fp8_caches(case, has_token_scales=has_token_scales)
    there = store_cases.make_fp8_caches(case, has_token_scales=has_token_scales, device=CUDA)
    store_reference.store_kv(key, value, *here[:2], slots, *here[2:])
    store_kv(key.to(CUDA), value.to(CUDA), *there[:2], slots.to(CUDA), *there[2:])
    for ours, theirs in zip(there, here, strict=True):
        if isinstance(ours, torch.Tensor) and isinstance(theirs, torch.Tensor):
            assert torch.equal(ours.cpu().float(), theirs.float())
