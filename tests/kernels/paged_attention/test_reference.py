"""The definition of paged attention against torch's and transformers' attention."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers.models.bert import modeling_bert
from transformers.models.gemma2 import modeling_gemma2
from transformers.models.gpt_oss import modeling_gpt_oss

from kernels.paged_attention import BlockSparsity, reference
from kernels.paged_attention.cases import Case, Inputs, make
from tests.kernels.tolerances import assert_close


def define(inputs: Inputs) -> torch.Tensor:
    return reference.paged_attention(inputs.query, inputs.key_cache, inputs.value_cache, inputs.batch, inputs.options)


def sdpa(inputs: Inputs, *, sequence: int = 0, **options: Any) -> torch.Tensor:
    """torch's attention of one sequence over its dense keys, [Q, Hq, Dv]."""
    query, keys, values = inputs.dense(sequence)
    expected = scaled_dot_product_attention(query[None], keys[None], values[None], enable_gqa=True, **options)
    return expected[0].transpose(0, 1)


@pytest.mark.parametrize("cache", ["as query", "fp8", "fp8_per_token_head"])
@pytest.mark.parametrize("length", [1, 16, 50])
def test_a_prompt_is_torch_s_causal_attention(length: int, cache: str) -> None:
    """With FP8 over the dequantised keys and values."""
    inputs = make(Case("prefill", ((length, length),), cache=cache), torch.float32)
    assert_close(define(inputs), sdpa(inputs, is_causal=True))


def test_chunks_and_decodes_are_rows_of_the_whole_prompt() -> None:
    inputs = make(Case("chunks", ((1, 30), (7, 30))), torch.float32)
    for sequence, num_queries in enumerate((1, 7)):
        hidden = torch.arange(30) > torch.arange(30 - num_queries, 30)[:, None]
        mask = torch.zeros(num_queries, 30).masked_fill(hidden, float("-inf"))
        start, end = inputs.batch.query_start[sequence : sequence + 2]
        assert_close(define(inputs)[start:end], sdpa(inputs, sequence=sequence, attn_mask=mask))


def test_slopes_are_a_bias_of_torch() -> None:
    inputs = make(Case("prefill", ((30, 30),), has_slopes=True), torch.float32)
    assert inputs.options.alibi_slopes is not None
    distance = torch.arange(30)[:, None] - torch.arange(30)[None]
    bias = -inputs.options.alibi_slopes[:, None, None] * distance
    bias.masked_fill_(distance < 0, float("-inf"))
    assert_close(define(inputs), sdpa(inputs, attn_mask=bias[None]))


@pytest.mark.parametrize("cache", ["as query", "fp8_per_token_head"])
@pytest.mark.parametrize("num_queries", [1, 5, 50])
def test_cross_attention_sees_every_key(num_queries: int, cache: str) -> None:
    inputs = make(Case("cross", ((num_queries, 23),), is_causal=False, cache=cache), torch.float32)
    assert_close(define(inputs), sdpa(inputs))


def test_cross_attention_equals_eager_attention_of_bert() -> None:
    inputs = make(Case("cross", ((9, 23),), num_heads=2, is_causal=False), torch.float32)
    query, keys, values = inputs.dense(0)
    module: Any = SimpleNamespace(training=False)
    expected, _ = modeling_bert.eager_attention_forward(
        module, query[None], keys[None], values[None], None, scaling=inputs.options.scale, dropout=0.0
    )
    assert_close(define(inputs), expected[0])


@pytest.mark.parametrize("step", [0, 1, 3, -1, -2])
def test_block_sparsity_is_the_rule_written_out(step: int) -> None:
    """One query after the other, in Python: the query's last blocks, and every third one of before."""
    sparsity = BlockSparsity(4, 2, 3, step)
    inputs = make(Case("sparse", ((37, 37),), 6, 2, sparsity=sparsity), torch.float32)
    mask = torch.full((6, 37, 37), float("-inf"))
    for head in range(6):
        offset = 1 + (head * step if step >= 0 else head // 3 * -step)
        for query in range(37):
            for key in range(query + 1):
                is_local = query // 4 - key // 4 < 2
                if is_local or (key // 4 + offset) % 3 == 0:
                    mask[head, query, key] = 0.0
    assert 0 < float((mask[:, 36] == 0).float().mean()) < 0.8
    assert_close(define(inputs), sdpa(inputs, attn_mask=mask[None]))


@pytest.mark.parametrize("has_sinks", [False, True])
@pytest.mark.parametrize("window", [None, 9])
def test_equals_eager_attention_of_transformers(has_sinks: bool, window: int | None) -> None:
    """gemma2 for the soft cap, gpt-oss for the sinks, both with a window."""
    softcap = None if has_sinks else 2.0
    case = Case("prefill", ((40, 40),), softcap=softcap, has_sinks=has_sinks, sliding_window=window)
    inputs = make(case, torch.float32)
    query, keys, values = (tensor[None] for tensor in inputs.dense(0))
    distance = torch.arange(40)[:, None] - torch.arange(40)[None]
    hidden = (distance < 0) | (distance >= (window or 1000))
    mask = torch.zeros(1, 1, 40, 40).masked_fill(hidden, torch.finfo(torch.float32).min)
    module: Any = SimpleNamespace(num_key_value_groups=2, training=False, sinks=inputs.options.sinks)
    scale = inputs.options.scale
    if has_sinks:
        expected, _ = modeling_gpt_oss.eager_attention_forward(
            module, query, keys, values, mask, scaling=scale, dropout=0.0
        )
    else:
        expected, _ = modeling_gemma2.eager_attention_forward(
            module, query, keys, values, mask, dropout=0.0, scaling=scale, softcap=softcap
        )
    assert_close(define(inputs), expected[0])
