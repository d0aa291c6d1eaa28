"""Decode attention in C against the definition of attention."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels import native_code
from kernels.paged_attention import AttentionBatch, cpu_decode, reference
from kernels.paged_attention.cases import ALL_CASES, Case, Inputs, make
from tests.kernels.tolerances import assert_close

DTYPES = (torch.float32, torch.bfloat16)


@pytest.fixture(autouse=True, scope="module")
def few_keys_are_shared_out_too() -> Iterator[None]:
    """So that small cases run in all threads."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cpu_decode, "PARALLEL_BYTES", 1)
        yield


def serves(inputs: Inputs) -> bool:
    return cpu_decode.can_serve(inputs.query, inputs.key_cache, inputs.value_cache, inputs.options)


def run(inputs: Inputs) -> torch.Tensor:
    """[T, Hq, Dv]; rows of sequences with several queries stay NaN."""
    assert serves(inputs)
    output = inputs.query.new_full((*inputs.query.shape[:2], inputs.value_cache.shape[3]), float("nan"))
    cpu_decode.attend(
        *(inputs.query, inputs.key_cache, inputs.value_cache), inputs.batch.decodes, inputs.options, output
    )
    return output


def define(inputs: Inputs) -> torch.Tensor:
    """Of the decodes; NaN elsewhere."""
    whole = reference.paged_attention(inputs.query, inputs.key_cache, inputs.value_cache, inputs.batch, inputs.options)
    rows = torch.from_numpy(inputs.batch.decodes.tokens).long()
    return torch.full_like(whole, float("nan")).index_copy(0, rows, whole[rows])


def assert_same(actual: torch.Tensor, expected: torch.Tensor) -> None:
    """NaN in the same places, close elsewhere."""
    assert torch.equal(actual.isnan(), expected.isnan())
    assert_close(actual.nan_to_num(), expected.nan_to_num())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_equals_the_definition_in_every_case_that_it_serves(dtype: torch.dtype) -> None:
    served = [inputs for case in ALL_CASES if serves(inputs := make(case, dtype))]
    assert len(served) > len(ALL_CASES) / 2
    for inputs in served:
        assert_same(run(inputs), define(inputs))


@st.composite
def cases(draw: st.DrawFn) -> Case:
    num_kv_heads = draw(st.integers(1, 4))
    return Case(
        "random",
        tuple((draw(st.sampled_from((1, 1, 1, 3))), draw(st.integers(3, 700))) for _ in range(draw(st.integers(0, 5)))),
        num_heads=num_kv_heads * draw(st.integers(1, 5)),
        num_kv_heads=num_kv_heads,
        key_dim=16 * draw(st.integers(1, 5)),
        value_dim=16 * draw(st.integers(1, 5)),
        block_size=draw(st.sampled_from((4, 12, 16, 32, 64, 256))),
        sliding_window=draw(st.none() | st.integers(1, 700)),
        softcap=draw(st.sampled_from((None, 0.5, 30.0))),
        has_sinks=draw(st.booleans()),
        has_slopes=draw(st.booleans()),
    )


@settings(max_examples=80, database=None)
@given(case=cases(), dtype=st.sampled_from(DTYPES), num_threads=st.integers(1, 3))
def test_random_cases_equal_the_definition(case: Case, dtype: torch.dtype, num_threads: int) -> None:
    inputs = make(case, dtype)
    with threads(num_threads):
        assert_same(run(inputs), define(inputs))


@contextmanager
def threads(count: int) -> Iterator[None]:
    """So many of torch's threads, within."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


MANY = Case("many", ((1, 300), (1, 17), (4, 40), (1, 1), (1, 256), (1, 257), (1, 512)), 8, 4, 32, 32)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_neither_threads_nor_other_sequences_change_a_bit(dtype: torch.dtype) -> None:
    inputs = make(MANY, dtype)
    with threads(1):
        together = run(inputs)
    batch = inputs.batch
    for num_threads in (1, 2, 5):
        with threads(num_threads):
            assert torch.equal(run(inputs).nan_to_num(), together.nan_to_num())
            for row in batch.decodes.sequences.tolist():
                start = batch.query_start[row]
                alone = AttentionBatch.build(
                    batch.block_tables[row : row + 1], [0, 1], batch.context_lens[row : row + 1]
                )
                single = replace(inputs, query=inputs.query[start : start + 1], batch=alone)
                assert torch.equal(run(single)[0], together[start])


@pytest.mark.parametrize("window", [None, 20])
def test_nan_beyond_a_sequence_and_left_of_its_window_is_not_seen(window: int | None) -> None:
    """Blocks hold what their last owner wrote, and those left of the window may be somebody else's by now."""
    inputs = make(replace(MANY, sliding_window=window), torch.float32)
    expected = run(inputs)
    seen = torch.zeros(inputs.key_cache.shape[:2], dtype=torch.bool)
    for table, end in zip(inputs.batch.block_tables, inputs.batch.context_lens, strict=True):
        positions = torch.arange(0 if window is None else max(end - window, 0), end)
        seen[table[positions // 16].long(), positions % 16] = True
    for cache in (inputs.key_cache, inputs.value_cache):
        cache[~seen] = float("nan")
    assert torch.equal(run(inputs).nan_to_num(), expected.nan_to_num())


@pytest.mark.parametrize("name", ["key_cache", "value_cache"])
def test_nan_of_one_sequence_shows_in_it_and_nowhere_else(name: str) -> None:
    inputs = make(MANY, torch.bfloat16)
    expected = run(inputs)
    cache = getattr(inputs, name)
    cache[inputs.batch.block_tables[0, 3].long(), 5] = float("nan")
    actual = run(inputs)
    assert actual[0].isnan().all()
    assert torch.equal(actual[1:].nan_to_num(), expected[1:].nan_to_num())


@pytest.mark.parametrize("size", [1e-6, 30.0, 1e4])
def test_scores_of_any_size_are_weighed(size: float) -> None:
    """From nearly equal weights to all of it on one key."""
    inputs = make(replace(MANY, softcap=None), torch.float32)
    inputs = replace(inputs, query=inputs.query * size)
    assert_same(run(inputs), define(inputs))


def test_a_chunk_of_scores_that_are_minus_infinity_weighs_nothing() -> None:
    """Finite keys whose products overflow, in the first chunk of a sequence."""
    inputs = make(Case("one", ((1, 300),), 2, 1, 16, 16), torch.float32)
    inputs = replace(inputs, query=inputs.query.abs() + 1)
    blocks = inputs.batch.block_tables[0].long()
    inputs.key_cache[blocks[:16]] = -3e38
    assert run(inputs).isfinite().all()
    assert_same(run(inputs), define(inputs))


def test_long_sums_lose_no_more_than_their_blocks_do() -> None:
    """Against float64: 64k keys of nearly equal weight."""
    inputs = make(Case("one", ((1, 1 << 16),), 1, 1, 16, 16, block_size=64), torch.float32)
    keys, values = (cache.double() for cache in inputs.dense(0)[1:])
    weights = (keys[0] @ inputs.query[0, 0].double() * inputs.options.scale).softmax(dim=0)
    expected = weights @ (values[0] + 1)
    inputs.value_cache.add_(1)
    torch.testing.assert_close(run(inputs)[0, 0].double(), expected, rtol=1e-5, atol=0)


def test_default_dtype_of_torch_does_not_matter() -> None:
    """Loading a checkpoint changes it for a while."""
    inputs = make(MANY, torch.float32)
    expected = run(inputs)
    torch.set_default_dtype(torch.bfloat16)
    try:
        assert torch.equal(run(inputs).nan_to_num(), expected.nan_to_num())
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize(
    ("lengths", "num_kv_heads", "num_threads", "parts"),
    [
        ((1024,) * 32, 8, 2, 1),
        ((4096,), 8, 2, 4),
        ((4096,), 8, 16, 8),
        ((4096,), 1, 16, 1),
        ((100,) * 7 + (16384,), 8, 2, 4),
    ],
)
def test_no_task_is_more_than_half_of_a_thread_s_share(
    lengths: tuple[int, ...], num_kv_heads: int, num_threads: int, parts: int
) -> None:
    """As far as there are key heads to share out."""
    assert cpu_decode._head_parts(np.array(lengths), num_kv_heads, num_threads) == parts


def test_few_keys_are_done_by_the_caller_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Waking the others takes longer, much longer where they have no core of their own."""
    inputs = make(MANY, torch.float32)
    expected = run(inputs)
    monkeypatch.setattr(cpu_decode, "PARALLEL_BYTES", 1 << 30)
    monkeypatch.setattr(native_code, "openmp_parallel", lambda: 1)  # no address of a function
    with threads(2):
        assert torch.equal(run(inputs).nan_to_num(), expected.nan_to_num())


def test_no_decodes_are_no_work(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native_code, "openmp_parallel", lambda: 1)
    inputs = make(Case("prefill", ((19, 19),)), torch.float32)
    with threads(2):
        assert run(inputs).isnan().all()


def test_what_it_does_not_serve_is_told() -> None:
    inputs = make(MANY, torch.float32)
    assert serves(inputs)
    for case in (
        replace(MANY, key_dim=24),
        replace(MANY, value_dim=8),
        replace(MANY, block_size=6),
        replace(MANY, block_size=512),
        replace(MANY, cache="fp8"),
        next(case for case in ALL_CASES if case.sparsity is not None),
    ):
        assert not serves(make(case, torch.float32))
    assert not serves(make(MANY, torch.float16))
    assert not serves(replace(inputs, query=inputs.query.clone().requires_grad_()))
    assert not serves(replace(inputs, key_cache=inputs.key_cache.transpose(0, 1).contiguous().transpose(0, 1)))
