"""Attention of several queries per sequence in C against the definition of attention."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings, strategies as st

from kernels.native import get_num_threads, set_num_threads
from kernels.paged_attention import AttentionBatch, native, reference
from kernels.paged_attention.cases import ALL_CASES, Case, Inputs, make
from tests.kernels.threads import in_threads
from tests.kernels.tolerances import assert_close

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
CACHES = ("as query", "fp8", "fp8_per_token_head")
MANY = Case("many", ((130, 300), (2, 17), (40, 40), (1, 90), (7, 257)), 8, 4, 32, 48)


def serves(inputs: Inputs) -> bool:
    return native.can_serve(inputs.query, inputs.key_cache, inputs.value_cache, inputs.options)


def run(inputs: Inputs) -> torch.Tensor:
    assert serves(inputs)
    output = inputs.query.new_full((*inputs.query.shape[:2], inputs.value_cache.shape[3]), float("nan"))
    native.attend(inputs.query, inputs.key_cache, inputs.value_cache, inputs.batch, inputs.options, output)
    return output


def define(inputs: Inputs) -> torch.Tensor:
    return reference.paged_attention(inputs.query, inputs.key_cache, inputs.value_cache, inputs.batch, inputs.options)


def of_one(inputs: Inputs, row: int, first: int = 0, last: int | None = None) -> Inputs:
    """The queries [first, last) of one sequence alone, as its last tokens."""
    start, end = inputs.batch.query_start[row : row + 2]
    num_queries = end - start
    last = num_queries if last is None else last
    num_keys = inputs.batch.context_lens[row] - (num_queries - last)
    batch = AttentionBatch.build(inputs.batch.block_tables[row : row + 1], [0, last - first], [num_keys])
    return replace(inputs, query=inputs.query[start + first : start + last], batch=batch)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_equals_the_definition_in_every_case_that_it_serves(dtype: torch.dtype) -> None:
    served = [inputs for case in ALL_CASES if case.is_causal and serves(inputs := make(case, dtype))]
    assert len(served) > len(ALL_CASES) / 2
    for inputs in served:
        assert_close(run(inputs), define(inputs))


@st.composite
def cases(draw: st.DrawFn) -> Case:
    num_kv_heads = draw(st.integers(1, 3))
    sequences = []
    for _ in range(draw(st.integers(1, 3))):
        num_keys = draw(st.integers(1, 400))
        sequences.append((min(draw(st.sampled_from((1, 2, 5, 13, 100, 400))), num_keys), num_keys))
    return Case(
        "random",
        tuple(sequences),
        num_heads=num_kv_heads * draw(st.sampled_from((1, 2, 3, 5, 8, 13))),
        num_kv_heads=num_kv_heads,
        key_dim=16 * draw(st.integers(1, 5)),
        value_dim=16 * draw(st.integers(1, 5)),
        block_size=draw(st.sampled_from((1, 3, 4, 16, 64, 300))),
        sliding_window=draw(st.none() | st.integers(1, 400)),
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
        assert_close(run(inputs), define(inputs))
    finally:
        set_num_threads(before)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("cache", CACHES)
def test_neither_threads_nor_other_sequences_change_a_bit(cache: str, dtype: torch.dtype) -> None:
    inputs = make(replace(MANY, cache=cache, has_sinks=True), dtype)
    together = run(inputs)
    for output in in_threads(lambda: run(inputs)):
        assert torch.equal(output, together)
    for row, (start, end) in enumerate(zip(inputs.batch.query_start[:-1], inputs.batch.query_start[1:], strict=True)):
        for output in in_threads(lambda row=row: run(of_one(inputs, row))):  # type: ignore[misc]  # bound now
            assert torch.equal(output, together[start:end])


@pytest.mark.parametrize("window", [None, 20, 150])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_how_a_prompt_is_cut_in_chunks_changes_no_bit(dtype: torch.dtype, window: int | None) -> None:
    inputs = make(Case("prompt", ((290, 310),), 6, 2, 32, 32, sliding_window=window), dtype)
    whole = run(inputs)
    for first, last in ((0, 2), (1, 100), (99, 290), (150, 153), (288, 290)):
        assert torch.equal(run(of_one(inputs, 0, first, last)), whole[first:last])


@pytest.mark.parametrize("window", [None, 20])
def test_nan_beyond_a_sequence_and_left_of_its_window_is_not_seen(window: int | None) -> None:
    """Blocks hold what their last owner wrote, and those left of the window may be somebody else's by now."""
    inputs = make(replace(MANY, sliding_window=window), torch.bfloat16)
    expected = run(inputs)
    seen = torch.zeros(inputs.key_cache.shape[:2], dtype=torch.bool)
    for (num_queries, end), table in zip(MANY.sequences, inputs.batch.block_tables, strict=True):
        positions = torch.arange(0 if window is None else max(end - num_queries + 1 - window, 0), end)
        seen[table[positions // 16].long(), positions % 16] = True
    for cache in (inputs.key_cache, inputs.value_cache):
        cache[~seen] = float("nan")
    assert torch.equal(run(inputs), expected)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("name", ["key_cache", "value_cache"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("window", [None, 9])
def test_what_a_token_holds_shows_in_the_queries_that_see_it_alone(
    window: int | None, dtype: torch.dtype, name: str, value: float
) -> None:
    """Neither in earlier tokens of its sequence, nor in those whose window has passed it, nor in other sequences."""
    inputs = make(replace(MANY, sliding_window=window), dtype)
    expected = run(inputs)
    num_queries, num_keys = MANY.sequences[0]
    place = 233
    cache = getattr(inputs, name)
    cache[inputs.batch.block_tables[0, place // 16].long(), place % 16] = value
    actual = run(inputs)
    first = place - (num_keys - num_queries)
    last = num_queries if window is None else first + window
    assert not actual[first:last].isfinite().all(dim=2).any() or name == "key_cache"
    assert torch.equal(actual[first:last].isnan(), define(inputs)[first:last].isnan())
    for rows in (slice(0, first), slice(last, None)):
        assert torch.equal(actual[rows], expected[rows])


@pytest.mark.parametrize("size", [1e-6, 30.0, 1e4])
def test_scores_of_any_size_are_weighed(size: float) -> None:
    """From nearly equal weights to all of it on one key."""
    inputs = make(MANY, torch.float32)
    inputs = replace(inputs, query=inputs.query * size)
    assert_close(run(inputs), define(inputs))


def test_rows_of_queries_and_outputs_may_lie_apart() -> None:
    inputs = make(MANY, torch.bfloat16)
    num_tokens = inputs.query.shape[0]
    fused = torch.full((num_tokens, 8 * 32 + 40), float("nan"), dtype=torch.bfloat16)
    wide = torch.full((num_tokens, 8 * 48 + 8), float("nan"), dtype=torch.bfloat16)
    query, output = fused[:, 8 : 8 + 8 * 32].view(num_tokens, 8, 32), wide[:, 8:].view(num_tokens, 8, 48)
    query.copy_(inputs.query)
    native.attend(query, inputs.key_cache, inputs.value_cache, inputs.batch, inputs.options, output)
    assert torch.equal(output, run(inputs))
    assert wide[:, :8].isnan().all()


def test_more_query_heads_than_a_tile_has_rows_are_served() -> None:
    inputs = make(Case("wide", ((3, 140), (1, 140)), 200, 1, 16, 16), torch.float32)
    assert_close(run(inputs), define(inputs))
    one, two, three = in_threads(lambda: run(inputs))
    assert torch.equal(one, two) and torch.equal(one, three)
