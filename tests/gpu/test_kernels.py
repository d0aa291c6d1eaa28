"""Every kernel on the GPU against its definition on the CPU, over the same cases as the CPU tests."""

from __future__ import annotations

from dataclasses import fields, is_dataclass
from typing import Any

import pytest
import torch

from kernels.lora import Route, add_lora
from kernels.lora import cases as lora_cases
from kernels.paged_attention import AttentionBatch, paged_attention
from kernels.paged_attention import cases as attention_cases
from kernels.paged_attention import reference as attention_reference
from kernels.sampling import SamplingRows, sample
from kernels.store_kv import cases as store_cases
from kernels.store_kv import store_kv
from tests.kernels.tolerances import assert_close

pytestmark = pytest.mark.gpu

DTYPES = (torch.float32, torch.bfloat16)
CUDA = torch.device("cuda")
by_name = {"ids": lambda case: case.name}


def to_gpu(value: Any) -> Any:
    """`value` with every tensor in it on the GPU, strides kept."""
    if isinstance(value, torch.Tensor):
        out = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=CUDA)
        return out.copy_(value)
    if is_dataclass(value) and not isinstance(value, type):
        return type(value)(*(to_gpu(getattr(value, field.name)) for field in fields(value)))
    return value


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", lora_cases.CASES, **by_name)
def test_add_lora(case: lora_cases.Case, dtype: torch.dtype) -> None:
    inputs = lora_cases.make(case, dtype)
    expected = inputs.y.clone()
    add_lora(expected, inputs.x, inputs.paged, Route.build(inputs.token_slots, torch.device("cpu")))
    y, x, stacked = to_gpu(inputs.y), to_gpu(inputs.x), to_gpu(inputs.stacked)
    add_lora(y, x, stacked, Route.build(inputs.token_slots, CUDA))
    assert_close(y.cpu(), expected, magnitude=4.0)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", attention_cases.CASES, **by_name)
def test_paged_attention(case: attention_cases.Case, dtype: torch.dtype) -> None:
    inputs = attention_cases.make(case, dtype)
    settings = {"scale": inputs.scale, "sliding_window": case.sliding_window, "softcap": case.softcap}
    expected = attention_reference.paged_attention(
        inputs.query,
        inputs.key_cache,
        inputs.value_cache,
        inputs.block_tables,
        inputs.query_start,
        inputs.context_lens,
        sinks=inputs.sinks,
        alibi_slopes=inputs.alibi_slopes,
        **settings,
    )
    batch = AttentionBatch.build(to_gpu(inputs.block_tables), inputs.query_start, inputs.context_lens)
    query, keys, values = to_gpu(inputs.query), to_gpu(inputs.key_cache), to_gpu(inputs.value_cache)
    settings |= {"sinks": to_gpu(inputs.sinks), "alibi_slopes": to_gpu(inputs.alibi_slopes)}
    actual = paged_attention(query, keys, values, batch, **settings)
    assert_close(actual.cpu(), expected)


@pytest.mark.parametrize("case", store_cases.CASES, **by_name)
def test_store_kv(case: store_cases.Case) -> None:
    key, value, slot_mapping = store_cases.make(case, torch.bfloat16)
    shape = (case.num_blocks, case.block_size, case.num_kv_heads)
    caches = [torch.zeros(*shape, dim, dtype=torch.bfloat16) for dim in (case.key_dim, case.value_dim)]
    on_gpu = [cache.to(CUDA) for cache in caches]
    store_kv(key, value, *caches, slot_mapping)
    store_kv(to_gpu(key), to_gpu(value), *on_gpu, slot_mapping.to(CUDA))
    for cache, other in zip(caches, on_gpu, strict=True):
        assert torch.equal(cache, other.cpu())


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_sampling_draws_what_the_cpu_draws(temperature: float) -> None:
    logits = torch.randn(64, 32_000, generator=torch.Generator().manual_seed(3))
    count = len(logits)
    rows = SamplingRows(
        temperature=torch.full((count,), temperature),
        top_k=torch.full((count,), 50),
        top_p=torch.full((count,), 0.9),
        seed=torch.arange(count, dtype=torch.int64),
        position=torch.full((count,), 7, dtype=torch.int64),
    )
    assert torch.equal(sample(logits.to(CUDA), to_gpu(rows)).cpu(), sample(logits, rows))
