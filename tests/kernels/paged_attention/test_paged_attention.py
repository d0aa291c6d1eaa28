"""Paged, cross and encoder attention without Triton, against their definition."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings

from kernels.paged_attention import (
    AttentionBatch,
    BlockSparsity,
    cross_attention,
    encoder_attention,
    native,
    paged_attention,
    reference,
)
from kernels.paged_attention.cases import ALL_CASES, CASES, Case, Inputs, make
from tests.kernels.paged_attention.strategies import cases
from tests.kernels.tolerances import assert_close

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def run(inputs: Inputs, batch: AttentionBatch | None = None) -> torch.Tensor:
    """Through the public call of the batch's kind."""
    batch = batch or inputs.batch
    options = {field.name: getattr(inputs.options, field.name) for field in fields(inputs.options) if field.init}
    attention = paged_attention if batch.is_causal else cross_attention
    if not batch.is_causal:
        options = {name: options[name] for name in ("scale", "softcap", "key_scale", "value_scale")}
    return attention(inputs.query, inputs.key_cache, inputs.value_cache, batch, **options)


def define(inputs: Inputs) -> torch.Tensor:
    return reference.paged_attention(inputs.query, inputs.key_cache, inputs.value_cache, inputs.batch, inputs.options)


def case_named(name: str) -> Case:
    return next(case for case in ALL_CASES if case.name == name)


@pytest.fixture
def without_native_code(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where there is no C compiler."""
    monkeypatch.setattr(native, "can_serve", lambda *_: False)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", ALL_CASES, ids=lambda case: case.name)
def test_equals_the_reference(case: Case, dtype: torch.dtype, without_native_code: None) -> None:
    inputs = make(case, dtype)
    assert_close(run(inputs), define(inputs))


@settings(max_examples=60, database=None)
@given(case=cases())
def test_random_cases_equal_the_reference(case: Case) -> None:
    """On whichever way each takes here."""
    inputs = make(case, torch.float32)
    assert_close(run(inputs), define(inputs))


@pytest.mark.parametrize("case", ALL_CASES, ids=lambda case: case.name)
def test_what_lies_in_unused_cache_entries_does_not_matter(case: Case) -> None:
    """Finite rubbish: a block's tail holds whatever its last owner wrote."""
    clean, dirty = make(case, torch.float32), make(case, torch.float32, poison=1e4)
    assert torch.equal(run(clean), run(dirty))


@pytest.mark.parametrize("case", ALL_CASES, ids=lambda case: case.name)
def test_every_output_is_written(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = make(case, torch.float32)
    monkeypatch.setattr(torch.Tensor, "new_empty", lambda self, *shape: self.new_full(shape, float("nan")))
    assert run(inputs).isfinite().all()


def test_blocks_left_of_the_window_are_not_read() -> None:
    """They may belong to somebody else by then."""
    case = Case("window", ((1, 64), (1, 60), (1, 40), (5, 64)), sliding_window=9)
    inputs = make(case, torch.float32)
    expected = run(inputs)
    for row, (num_queries, num_keys) in enumerate(case.sequences):
        num_left = (num_keys - num_queries + 1 - 9) // case.block_size
        assert num_left > 0
        for cache in (inputs.key_cache, inputs.value_cache):
            cache[inputs.batch.block_tables[row, :num_left].long()] = float("nan")
    assert torch.equal(run(inputs), expected)


@pytest.mark.parametrize("name", ["mixed", "cross", "FP8 per token and head", "sparse, heads alike"])
def test_a_sequence_does_not_see_the_others(name: str) -> None:
    inputs = make(case_named(name), torch.float32)
    batch = inputs.batch
    together = run(inputs)
    for row, (start, end) in enumerate(zip(batch.query_start[:-1], batch.query_start[1:], strict=True)):
        alone = AttentionBatch.build(
            batch.block_tables[row : row + 1],
            [0, end - start],
            batch.context_lens[row : row + 1],
            is_causal=batch.is_causal,
        )
        assert_close(together[start:end], run(replace(inputs, query=inputs.query[start:end], batch=alone)))


def test_one_batch_serves_layers_of_different_windows() -> None:
    inputs = make(case_named("mixed"), torch.float32)
    for window in (None, 9, None):
        layer = replace(inputs, options=replace(inputs.options, sliding_window=window))
        assert_close(run(layer), define(layer))


def test_query_of_a_fused_projection_is_read_by_its_strides() -> None:
    inputs = make(case_named("mixed"), torch.float32)
    fused = torch.full((inputs.query.shape[0], 100), float("nan"))
    fused[:, 20:84] = inputs.query.flatten(1)
    assert torch.equal(run(replace(inputs, query=fused[:, 20:84].view(-1, 4, 16))), run(inputs))


def test_long_plain_prefill_is_cut_in_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kernels.paged_attention.cpu.SCORE_BYTES", 4 * 64 * 4 * 5)
    for options in ({"softcap": 3.0}, {"sparsity": BlockSparsity(4, 2, 3, 1)}, {"softcap": 3.0, "is_causal": False}):
        inputs = make(Case("prefill", ((33, 64), (64, 64)), **options), torch.float32)
        assert_close(run(inputs), define(inputs))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("softcap", [None, 2.0])
def test_encoder_attention_is_torch_s_attention_of_each_sequence(softcap: float | None, dtype: torch.dtype) -> None:
    """Keys and values are slices of one projection. Sequences of one token and of none are among them."""
    lengths = [5, 1, 0, 17, 1]
    fused = torch.randn(24, 4 * 16 + 2 * 16 + 2 * 8, generator=torch.Generator().manual_seed(1)).to(dtype)
    parts = zip(fused.split((64, 32, 16), 1), (4, 2, 2), strict=True)
    query, key, value = (part.unflatten(1, (heads, -1)) for part, heads in parts)
    output = encoder_attention(query, key, value, AttentionBatch.ragged(lengths), scale=0.25, softcap=softcap)
    assert output.shape == (24, 4, 8)
    for start, length in zip((0, 5, 6, 6, 23), lengths, strict=True):
        q, k, v = (part[start : start + length].transpose(0, 1).float() for part in (query, key, value))
        scores = q @ k.repeat_interleave(2, dim=0).transpose(1, 2) * 0.25
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        expected = scores.softmax(dim=-1) @ v.repeat_interleave(2, dim=0)
        assert_close(output[start : start + length], expected.transpose(0, 1).to(dtype))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"sliding_window": 0}, "sliding_window is 0"),
        ({"softcap": 0.0}, r"softcap is 0\.0"),
        ({"sinks": torch.zeros(3)}, r"sinks is torch\.float32 \(3,\), want floats \[4\]"),
        ({"sinks": torch.zeros(4, dtype=torch.int32)}, r"sinks is torch\.int32"),
        ({"sinks": torch.zeros(4, device="meta")}, "sinks is on meta, query on cpu"),
        ({"alibi_slopes": torch.zeros(4, device="meta")}, "alibi_slopes is on meta, query on cpu"),
        ({"sliding_window": 5, "sparsity": BlockSparsity(4, 1, 1)}, "want one of them"),
        ({"key_scale": 0.5}, r"only torch\.float8_e4m3fn caches have scales"),
    ],
)
def test_wrong_options_are_refused(change: dict[str, Any], message: str) -> None:
    inputs = make(CASES[1], torch.float32)
    with pytest.raises(ValueError, match=message):
        run(replace(inputs, options=replace(inputs.options, **change)))


@pytest.mark.parametrize("name", ["block_size", "local_blocks", "vertical_stride"])
def test_sparsity_of_nothing_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match=f"{name} is 0"):
        BlockSparsity(**{"block_size": 4, "local_blocks": 1, "vertical_stride": 1, name: 0})


def test_wrong_shapes_are_refused() -> None:
    inputs = make(CASES[1], torch.float32)
    tables = inputs.batch.block_tables
    with pytest.raises(ValueError, match="1 tokens"):
        run(replace(inputs, query=inputs.query.repeat(2, 1, 1)))
    with pytest.raises(ValueError, match="the caches are"):
        run(replace(inputs, query=inputs.query.double()))
    with pytest.raises(ValueError, match="want int32"):
        AttentionBatch.build(tables.long(), [0, 1], [1])
    with pytest.raises(ValueError, match="2 queries and 1 keys, want at least 2"):
        AttentionBatch.build(tables, [0, 2], [1])
    with pytest.raises(ValueError, match="2 queries and 0 keys, want at least 1"):
        AttentionBatch.build(tables, [0, 2], [0], is_causal=False)
    with pytest.raises(ValueError, match="need more than"):
        run(inputs, AttentionBatch.build(tables, [0, 1], [100]))
    with pytest.raises(ValueError, match="want a list of numbers"):
        AttentionBatch.ragged([3, -1])


def test_a_batch_of_another_kind_is_refused() -> None:
    inputs = make(CASES[1], torch.float32)
    arguments = (inputs.query, inputs.key_cache, inputs.value_cache)
    across = AttentionBatch.build(inputs.batch.block_tables, [0, 1], [1], is_causal=False)
    with pytest.raises(ValueError, match="the batch is not causal"):
        paged_attention(*arguments, across, scale=1.0)
    with pytest.raises(ValueError, match="the batch is causal"):
        cross_attention(*arguments, inputs.batch, scale=1.0)
    with pytest.raises(ValueError, match="the batch is ragged"):
        cross_attention(*arguments, AttentionBatch.ragged([1]), scale=1.0)
    with pytest.raises(ValueError, match=r"wants AttentionBatch\.ragged"):
        encoder_attention(*arguments, across, scale=1.0)
    with pytest.raises(ValueError, match=r"want \[2, Hkv, D\]"):
        encoder_attention(*(inputs.query,) * 3, AttentionBatch.ragged([2]), scale=1.0)
