"""paged_attention against its definition, and the definition against torch and transformers."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers.models.gemma2 import modeling_gemma2
from transformers.models.gpt_oss import modeling_gpt_oss

from kernels.paged_attention import AttentionBatch, paged_attention, reference
from kernels.paged_attention.cases import CASES, Case, Inputs, make
from tests.kernels.tolerances import assert_close

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def run(case: Case, inputs: Inputs, batch: AttentionBatch | None = None) -> torch.Tensor:
    batch = batch or AttentionBatch.build(inputs.block_tables, inputs.query_start, inputs.context_lens)
    return paged_attention(
        inputs.query,
        inputs.key_cache,
        inputs.value_cache,
        batch,
        scale=inputs.scale,
        sliding_window=case.sliding_window,
        softcap=case.softcap,
        sinks=inputs.sinks,
        alibi_slopes=inputs.alibi_slopes,
    )


def define(case: Case, inputs: Inputs) -> torch.Tensor:
    return reference.paged_attention(
        inputs.query,
        inputs.key_cache,
        inputs.value_cache,
        inputs.block_tables,
        inputs.query_start,
        inputs.context_lens,
        scale=inputs.scale,
        sliding_window=case.sliding_window,
        softcap=case.softcap,
        sinks=inputs.sinks,
        alibi_slopes=inputs.alibi_slopes,
    )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_equals_the_reference(case: Case, dtype: torch.dtype) -> None:
    inputs = make(case, dtype)
    assert_close(run(case, inputs), define(case, inputs))


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_what_lies_in_unused_cache_entries_does_not_matter(case: Case) -> None:
    """Finite rubbish: a block's tail holds whatever its last owner wrote."""
    clean, dirty = make(case, torch.float32), make(case, torch.float32, poison=1e4)
    assert torch.equal(run(case, clean), run(case, dirty))


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_every_output_is_written(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = make(case, torch.float32)
    monkeypatch.setattr(torch.Tensor, "new_empty", lambda self, *shape: self.new_full(shape, float("nan")))
    assert run(case, inputs).isfinite().all()


@pytest.mark.parametrize("length", [1, 16, 50])
def test_reference_equals_torch(length: int) -> None:
    case = Case("prefill", ((length, length),))
    inputs = make(case, torch.float32)
    keys, values = (
        cache[inputs.block_tables[0, : -(-length // 16)].long()].flatten(0, 1)[:length].transpose(0, 1)[None]
        for cache in (inputs.key_cache, inputs.value_cache)
    )
    expected = scaled_dot_product_attention(
        inputs.query.transpose(0, 1)[None], keys, values, is_causal=True, enable_gqa=True
    )
    assert_close(define(case, inputs), expected[0].transpose(0, 1))


def test_slopes_of_the_reference_are_a_bias_of_torch() -> None:
    case = Case("prefill", ((30, 30),), has_slopes=True)
    inputs = make(case, torch.float32)
    assert inputs.alibi_slopes is not None
    keys, values = (
        cache[inputs.block_tables[0, :2].long()].flatten(0, 1)[:30].transpose(0, 1)[None]
        for cache in (inputs.key_cache, inputs.value_cache)
    )
    distance = torch.arange(30)[:, None] - torch.arange(30)[None]
    bias = -inputs.alibi_slopes[:, None, None] * distance
    bias.masked_fill_(distance < 0, float("-inf"))
    query = inputs.query.transpose(0, 1)[None]
    expected = scaled_dot_product_attention(query, keys, values, bias[None], enable_gqa=True)
    assert_close(define(case, inputs), expected[0].transpose(0, 1))


@pytest.mark.parametrize("has_sinks", [False, True])
@pytest.mark.parametrize("window", [None, 9])
def test_reference_equals_eager_attention_of_transformers(has_sinks: bool, window: int | None) -> None:
    """gemma2 for the soft cap, gpt-oss for the sinks, both with a window."""
    softcap = None if has_sinks else 2.0
    case = Case("prefill", ((40, 40),), softcap=softcap, has_sinks=has_sinks, sliding_window=window)
    inputs = make(case, torch.float32)
    keys, values = (
        cache[inputs.block_tables[0, :3].long()].flatten(0, 1)[:40].transpose(0, 1)[None]
        for cache in (inputs.key_cache, inputs.value_cache)
    )
    distance = torch.arange(40)[:, None] - torch.arange(40)[None]
    hidden = (distance < 0) | (distance >= (window or 1000))
    mask = torch.zeros(1, 1, 40, 40).masked_fill(hidden, torch.finfo(torch.float32).min)
    module: Any = SimpleNamespace(num_key_value_groups=2, training=False, sinks=inputs.sinks)
    query = inputs.query.transpose(0, 1)[None]
    if has_sinks:
        expected, _ = modeling_gpt_oss.eager_attention_forward(
            module, query, keys, values, mask, scaling=inputs.scale, dropout=0.0
        )
    else:
        expected, _ = modeling_gemma2.eager_attention_forward(
            module, query, keys, values, mask, dropout=0.0, scaling=inputs.scale, softcap=softcap
        )
    assert_close(define(case, inputs), expected[0])


def test_blocks_left_of_the_window_are_not_read() -> None:
    """They may belong to somebody else by then."""
    case = Case("window", ((1, 64), (1, 60), (1, 40), (5, 64)), sliding_window=9)
    inputs = make(case, torch.float32)
    expected = run(case, inputs)
    for row, (num_queries, num_keys) in enumerate(case.sequences):
        num_left = (num_keys - num_queries + 1 - 9) // case.block_size
        assert num_left > 0
        for cache in (inputs.key_cache, inputs.value_cache):
            cache[inputs.block_tables[row, :num_left].long()] = float("nan")
    assert torch.equal(run(case, inputs), expected)


def test_a_sequence_does_not_see_the_others() -> None:
    case = next(case for case in CASES if case.name == "mixed")
    inputs = make(case, torch.float32)
    together = run(case, inputs)
    for row, (start, end) in enumerate(zip(inputs.query_start[:-1], inputs.query_start[1:], strict=True)):
        batch = AttentionBatch.build(
            inputs.block_tables[row : row + 1], [0, end - start], inputs.context_lens[row : row + 1]
        )
        alone = paged_attention(
            inputs.query[start:end], inputs.key_cache, inputs.value_cache, batch, scale=inputs.scale
        )
        assert_close(together[start:end], alone)


def test_one_batch_serves_layers_of_different_windows() -> None:
    plain = next(case for case in CASES if case.name == "mixed")
    window = next(case for case in CASES if case.name == "window")
    inputs = make(plain, torch.float32)
    batch = AttentionBatch.build(inputs.block_tables, inputs.query_start, inputs.context_lens)
    for case in (plain, window, plain):
        assert_close(run(case, inputs, batch), define(case, inputs))


def test_query_of_a_fused_projection_is_read_by_its_strides() -> None:
    case = next(case for case in CASES if case.name == "mixed")
    inputs = make(case, torch.float32)
    expected = run(case, inputs)
    fused = torch.randn(inputs.query.shape[0], 100)
    fused[:, 20:84] = inputs.query.flatten(1)
    inputs.query.fill_(float("nan"))
    strided = Inputs(
        fused[:, 20:84].view(-1, 4, 16),
        inputs.key_cache,
        inputs.value_cache,
        inputs.block_tables,
        inputs.query_start,
        inputs.context_lens,
        None,
        inputs.scale,
    )
    assert torch.equal(run(case, strided), expected)


def test_long_plain_prefill_is_cut_in_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kernels.paged_attention.cpu.SCORE_BYTES", 4 * 64 * 4 * 5)
    case = Case("prefill", ((33, 64), (64, 64)), softcap=3.0)
    inputs = make(case, torch.float32)
    assert_close(run(case, inputs), define(case, inputs))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"sliding_window": 0}, "sliding_window is 0"),
        ({"softcap": 0.0}, "softcap is 0.0"),
        ({"sinks": torch.zeros(3)}, r"sinks is \(3,\)"),
    ],
)
def test_wrong_options_are_refused(change: dict[str, object], message: str) -> None:
    inputs = make(CASES[1], torch.float32)
    batch = AttentionBatch.build(inputs.block_tables, inputs.query_start, inputs.context_lens)
    with pytest.raises(ValueError, match=message):
        paged_attention(inputs.query, inputs.key_cache, inputs.value_cache, batch, scale=1.0, **change)  # type: ignore[arg-type]


def test_wrong_shapes_are_refused() -> None:
    inputs = make(CASES[1], torch.float32)
    batch = AttentionBatch.build(inputs.block_tables, inputs.query_start, inputs.context_lens)
    with pytest.raises(ValueError, match="1 tokens"):
        paged_attention(inputs.query.repeat(2, 1, 1), inputs.key_cache, inputs.value_cache, batch, scale=1.0)
    with pytest.raises(ValueError, match="the caches are"):
        paged_attention(inputs.query.double(), inputs.key_cache, inputs.value_cache, batch, scale=1.0)
    with pytest.raises(ValueError, match="want int32"):
        AttentionBatch.build(inputs.block_tables.long(), [0, 1], [1])
    with pytest.raises(ValueError, match="2 queries and 1 keys"):
        AttentionBatch.build(inputs.block_tables, [0, 2], [1])
    with pytest.raises(ValueError, match="need more than"):
        run(CASES[1], inputs, AttentionBatch.build(inputs.block_tables, [0, 1], [100]))
