"""Decode attention in C against the definition of attention."""

from __future__ import annotations

import ctypes
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings, strategies as st

from kernels.native import Step, get_num_threads, run_one, set_num_threads
from kernels.paged_attention import AttentionBatch, native, reference
from kernels.paged_attention.cases import ALL_CASES, Case, Inputs, make
from tests.kernels.threads import in_threads
from tests.kernels.tolerances import assert_close

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
CACHES = ("as query", "fp8", "fp8_per_token_head")


def serves(inputs: Inputs) -> bool:
    return native.can_serve(inputs.query, inputs.key_cache, inputs.value_cache, inputs.options)


def run(inputs: Inputs) -> torch.Tensor:
    """[T, Hq, Dv]; rows of sequences with several queries stay NaN."""
    assert serves(inputs)
    output = inputs.query.new_full((*inputs.query.shape[:2], inputs.value_cache.shape[3]), float("nan"))
    attend(inputs, inputs.query, output)
    return output


def attend(inputs: Inputs, query: torch.Tensor, output: torch.Tensor) -> None:
    """The decodes alone."""
    layer = native.problem(query, inputs.key_cache, inputs.value_cache, inputs.options, output)
    step = Step(num_tokens=len(query), attention=ctypes.addressof(inputs.batch.native_step))
    run_one("attention_decode", layer, step)


def decodes(batch: AttentionBatch) -> list[int]:
    """The sequences with one query."""
    starts = batch.query_start
    return [row for row in range(len(batch.context_lens)) if starts[row + 1] - starts[row] == 1]


def define(inputs: Inputs) -> torch.Tensor:
    """Of the decodes; NaN elsewhere."""
    whole = reference.paged_attention(inputs.query, inputs.key_cache, inputs.value_cache, inputs.batch, inputs.options)
    rows = torch.tensor([inputs.batch.query_start[row] for row in decodes(inputs.batch)], dtype=torch.int64)
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
        num_heads=num_kv_heads * draw(st.sampled_from((1, 2, 3, 4, 5, 8, 17))),
        num_kv_heads=num_kv_heads,
        key_dim=16 * draw(st.integers(1, 5)),
        value_dim=16 * draw(st.integers(1, 5)),
        block_size=draw(st.sampled_from((1, 4, 6, 12, 16, 32, 64, 256, 300))),
        sliding_window=draw(st.none() | st.integers(1, 700)),
        softcap=draw(st.sampled_from((None, 0.5, 30.0))),
        has_sinks=draw(st.booleans()),
        has_slopes=draw(st.booleans()),
        cache=draw(st.sampled_from(CACHES)),
    )


@settings(max_examples=80, database=None)
@given(case=cases(), dtype=st.sampled_from(DTYPES), num_threads=st.integers(1, 3))
def test_random_cases_equal_the_definition(case: Case, dtype: torch.dtype, num_threads: int) -> None:
    inputs = make(case, dtype)
    before = get_num_threads()
    set_num_threads(num_threads)
    try:
        assert_same(run(inputs), define(inputs))
    finally:
        set_num_threads(before)


MANY = Case("many", ((1, 300), (1, 17), (4, 40), (1, 1), (1, 256), (1, 257), (1, 512)), 8, 4, 32, 32)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize("num_kv_heads", [4, 1])
def test_neither_threads_nor_other_sequences_change_a_bit(num_kv_heads: int, cache: str, dtype: torch.dtype) -> None:
    inputs = make(replace(MANY, num_kv_heads=num_kv_heads, cache=cache), dtype)
    batch = inputs.batch

    def alone(row: int) -> torch.Tensor:
        start = batch.query_start[row]
        single = AttentionBatch.build(batch.block_tables[row : row + 1], [0, 1], batch.context_lens[row : row + 1])
        return run(replace(inputs, query=inputs.query[start : start + 1], batch=single))[0]

    together = run(inputs)
    for output in in_threads(lambda: run(inputs)):
        assert torch.equal(output.nan_to_num(), together.nan_to_num())
    for row in decodes(batch):
        for output in in_threads(lambda row=row: alone(row)):  # type: ignore[misc]  # bound now
            assert torch.equal(output, together[batch.query_start[row]])


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


@pytest.mark.parametrize("num_heads", [4, 16])
def test_a_long_sequence_is_summed_in_parts_and_the_bits_stay(num_heads: int) -> None:
    """Alone, its parts are tasks; among many its parts are one task; and one key head is enough."""
    case = Case("long", ((1, 2050),), num_heads, 1, 32, 48)
    for window in (None, 1500):
        inputs = make(replace(case, sliding_window=window, has_sinks=True), torch.float32)
        assert_same(run(inputs), define(inputs))
        one, two, three = in_threads(lambda inputs=inputs: run(inputs))  # type: ignore[misc]  # bound now
        assert torch.equal(one, two) and torch.equal(one, three)
        many = make(replace(case, sequences=((1, 2050),) * 9, sliding_window=window, has_sinks=True), torch.float32)
        for row in range(9):
            many.query[row] = inputs.query[0]
            many.batch.host_tables[row] = many.batch.host_tables[0]
        blocks = many.batch.block_tables[0, :129].long()
        many.key_cache[blocks] = inputs.key_cache[inputs.batch.block_tables[0, :129].long()]
        many.value_cache[blocks] = inputs.value_cache[inputs.batch.block_tables[0, :129].long()]
        many = replace(many, options=inputs.options)
        for output in in_threads(lambda many=many: run(many)):  # type: ignore[misc]  # bound now
            assert torch.equal(output, one.expand_as(output))


def test_rows_of_queries_and_outputs_may_lie_apart() -> None:
    inputs = make(MANY, torch.bfloat16)
    num_tokens = inputs.query.shape[0]
    fused, wide = (torch.full((num_tokens, 8 * 32 + rest), float("nan"), dtype=torch.bfloat16) for rest in (40, 8))
    query, output = (part[:, 8 : 8 + 8 * 32].view(num_tokens, 8, 32) for part in (fused, wide))
    query.copy_(inputs.query)
    attend(inputs, query, output)
    assert torch.equal(output.nan_to_num(), run(inputs).nan_to_num())
    assert wide[:, :8].isnan().all()


def test_no_decodes_are_no_work() -> None:
    inputs = make(Case("prefill", ((19, 19),)), torch.float32)
    assert run(inputs).isnan().all()


@pytest.mark.parametrize(("num_heads", "dtype"), [(1, torch.float32), (8, torch.float32), (8, torch.bfloat16)])
def test_every_fp8_code_is_read_exactly(num_heads: int, dtype: torch.dtype) -> None:
    """One key takes all weight, whose value holds 64 of the codes: subnormal numbers and NaN are among them."""
    for first in range(0, 256, 64):
        inputs = make(Case("codes", ((1, 1),), num_heads, 1, 16, 64, cache="fp8"), dtype)
        block = inputs.batch.block_tables[0, 0]
        codes = torch.arange(first, first + 64, dtype=torch.uint8)
        inputs.value_cache.view(torch.uint8)[block, 0, 0] = codes
        options = replace(inputs.options, value_scale=1.0)
        expected = codes.view(torch.float8_e4m3fn).to(dtype)
        torch.testing.assert_close(
            run(replace(inputs, options=options))[0, 0], expected, rtol=0, atol=0, equal_nan=True
        )


def test_what_it_does_not_serve_is_reported() -> None:
    inputs = make(MANY, torch.float32)
    assert serves(inputs)
    for case in (
        replace(MANY, key_dim=24),
        replace(MANY, value_dim=8),
        next(case for case in ALL_CASES if case.sparsity is not None),
    ):
        assert not serves(make(case, torch.float32))
    assert not serves(replace(inputs, query=inputs.query.clone().requires_grad_()))
    assert not serves(replace(inputs, key_cache=inputs.key_cache.transpose(0, 1).contiguous().transpose(0, 1)))
