"""Rows of attention: decode and prefill over pages in the model's dtype and FP8, block-sparse, across, in encoders."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch

from benchmarks.kernels.torch_peers import dense_attention, paged_varlen
from benchmarks.kernels.work import BLOCK_SIZE, Made, Model, Work, random
from kernels.fp8 import FP8, fp8_refusal
from kernels.paged_attention import (
    AttentionBatch,
    BlockSparsity,
    cross_attention,
    encoder_attention,
    paged_attention,
)
from kernels.store_kv import store_kv

# As in the phi-3-small models.
SPARSITY = BlockSparsity(block_size=64, local_blocks=16, vertical_stride=8, head_sliding_step=1)


def works(model: Model, device: torch.device, dtype: torch.dtype, *, is_short: bool) -> Iterator[Work]:
    """FlexAttention, which compiles for every shape, is not among the peers of the short form."""
    is_gpu = device.type == "cuda"
    decodes = [(64, 1024), (256, 1024), (8, 4096), (1, 1024)] if is_gpu else [(32, 1024), (8, 512)]
    for num_sequences, length in decodes[: 3 if is_short else None]:
        yield decode_work(model, num_sequences, length, device, dtype, is_compiled=not is_short)
    num_sequences, length = decodes[0]
    if fp8_refusal(device) is None:
        yield decode_fp8_work(model, num_sequences, length, device, dtype, per_token_head=False)
        if not is_short:
            yield decode_fp8_work(model, num_sequences, length, device, dtype, per_token_head=True)
    num_sequences, length = (16, 8192) if is_gpu else (4, 2048)
    yield decode_sparse_work(model, num_sequences, length, device, dtype)
    prefills = [(8192, 0), (512, 8192), (2048, 0)] if is_gpu else [(256, 0), (64, 512)]
    for num_queries, prefix in prefills[: 2 if is_short else None]:
        yield prefill_work(model, num_queries, prefix, device, dtype, is_compiled=not is_short)
    yield cross_work(model, *((16, 128, 1500) if is_gpu else (2, 16, 300)), device, dtype)
    yield encoder_work(model, *((16, 1500) if is_gpu else (2, 128)), device, dtype)


def _paged(
    model: Model, num_sequences: int, length: int, device: torch.device, dtype: torch.dtype
) -> tuple[list[torch.Tensor], torch.Tensor, list[torch.Tensor]]:
    """Caches, block tables on the host, and the same keys and values as [num_sequences, Hkv, length, D]."""
    width = -(-length // BLOCK_SIZE)
    shape = (num_sequences * width, BLOCK_SIZE, model.num_kv_heads, model.dim)
    caches = [random(*shape, device=device, dtype=dtype) for _ in range(2)]
    tables = torch.randperm(num_sequences * width).view(num_sequences, width).int()
    order = tables.flatten().long().to(device)
    dense = [cache[order].view(num_sequences, -1, *shape[2:])[:, :length].transpose(1, 2) for cache in caches]
    return caches, tables, [part.contiguous() for part in dense]


def _arguments(
    model: Model, query: torch.Tensor, caches: list[torch.Tensor], batch: AttentionBatch, **options: Any
) -> dict[str, Any]:
    arguments = {"query": query, "key_cache": caches[0], "value_cache": caches[1], "batch": batch}
    return arguments | {"scale": model.dim**-0.5} | options


def _bytes(model: Model, num_queries: int, num_keys: int, itemsize: int, cache_itemsize: int | None = None) -> int:
    """Keys and values once, queries and outputs once."""
    kv = 2 * num_keys * model.num_kv_heads * model.dim * (cache_itemsize or itemsize)
    return kv + 2 * num_queries * model.num_heads * model.dim * itemsize


def _flops(model: Model, num_pairs: int) -> int:
    """For so many pairs of a query and a key that it sees."""
    return 4 * model.num_heads * model.dim * num_pairs


def decode_work(
    model: Model, num_sequences: int, length: int, device: torch.device, dtype: torch.dtype, *, is_compiled: bool
) -> Work:
    starts, lengths = range(num_sequences + 1), [length] * num_sequences

    def make() -> Made:
        caches, tables, dense = _paged(model, num_sequences, length, device, dtype)
        query = random(num_sequences, model.num_heads, model.dim, device=device, dtype=dtype)
        arguments = _arguments(model, query, caches, AttentionBatch.build(tables, starts, lengths))
        peers = dense_attention(query, dense, starts, lengths, is_causal=False, is_compiled=is_compiled)
        peers |= paged_varlen(query, caches, tables, starts, lengths)
        return Made(partial(paged_attention, **arguments), arguments, peers)

    num_keys = num_sequences * length
    num_bytes = _bytes(model, num_sequences, num_keys, dtype.itemsize)
    return Work("paged_attention", f"decode {num_sequences} x {length}", num_bytes, _flops(model, num_keys), make)


def decode_fp8_work(
    model: Model, num_sequences: int, length: int, device: torch.device, dtype: torch.dtype, *, per_token_head: bool
) -> Work:
    starts, lengths = range(num_sequences + 1), [length] * num_sequences

    def make() -> Made:
        plain, tables, _ = _paged(model, num_sequences, length, device, dtype)
        caches = [torch.zeros_like(cache, dtype=FP8) for cache in plain]
        scales = [torch.ones(plain[0].shape[:3], device=device) if per_token_head else 0.02 for _ in range(2)]
        slots = torch.arange(plain[0].shape[0] * BLOCK_SIZE, device=device)
        store_kv(plain[0].flatten(0, 1), plain[1].flatten(0, 1), caches[0], caches[1], slots, scales[0], scales[1])
        query = random(num_sequences, model.num_heads, model.dim, device=device, dtype=dtype)
        batch = AttentionBatch.build(tables, starts, lengths)
        arguments = _arguments(model, query, caches, batch, key_scale=scales[0], value_scale=scales[1])
        same = _arguments(model, query, plain, batch)
        return Made(
            partial(paged_attention, **arguments), arguments, {f"ours in {dtype}": partial(paged_attention, **same)}
        )

    num_keys = num_sequences * length
    num_bytes = _bytes(model, num_sequences, num_keys, dtype.itemsize, 1)
    num_bytes += 8 * num_keys * model.num_kv_heads * per_token_head
    name = f"decode {num_sequences} x {length}, FP8" + (", per token and head" if per_token_head else "")
    return Work("paged_attention", name, num_bytes, _flops(model, num_keys), make)


def decode_sparse_work(model: Model, num_sequences: int, length: int, device: torch.device, dtype: torch.dtype) -> Work:
    """Bytes and flops are those of the keys that are seen."""
    starts, lengths = range(num_sequences + 1), [length] * num_sequences

    def make() -> Made:
        caches, tables, _ = _paged(model, num_sequences, length, device, dtype)
        query = random(num_sequences, model.num_heads, model.dim, device=device, dtype=dtype)
        batch = AttentionBatch.build(tables, starts, lengths)
        arguments = _arguments(model, query, caches, batch, sparsity=SPARSITY)
        dense = _arguments(model, query, caches, batch)
        return Made(
            partial(paged_attention, **arguments), arguments, {"ours, dense": partial(paged_attention, **dense)}
        )

    offsets = SPARSITY.offsets(model.num_heads, model.num_kv_heads)
    sees = SPARSITY.sees(torch.tensor(length - 1), torch.arange(length)[None], offsets[:, None])
    by_kv_head = sees.view(model.num_kv_heads, -1, length).any(dim=1)
    num_bytes = 2 * num_sequences * int(by_kv_head.sum()) * model.dim * dtype.itemsize
    num_bytes += 2 * num_sequences * model.num_heads * model.dim * dtype.itemsize
    flops = 4 * num_sequences * int(sees.sum()) * model.dim
    return Work("paged_attention", f"sparse decode {num_sequences} x {length}", num_bytes, flops, make)


def prefill_work(
    model: Model, num_queries: int, prefix: int, device: torch.device, dtype: torch.dtype, *, is_compiled: bool
) -> Work:
    length = prefix + num_queries

    def make() -> Made:
        caches, tables, dense = _paged(model, 1, length, device, dtype)
        query = random(num_queries, model.num_heads, model.dim, device=device, dtype=dtype)
        starts = [0, num_queries]
        arguments = _arguments(model, query, caches, AttentionBatch.build(tables, starts, [length]))
        peers = paged_varlen(query, caches, tables, starts, [length])
        if prefix == 0:
            peers |= dense_attention(query, dense, starts, [length], is_causal=True, is_compiled=is_compiled)
        return Made(partial(paged_attention, **arguments), arguments, peers)

    pairs = num_queries * prefix + num_queries * (num_queries + 1) // 2
    num_bytes = _bytes(model, num_queries, length, dtype.itemsize)
    return Work("paged_attention", f"prefill {num_queries} after {prefix}", num_bytes, _flops(model, pairs), make)


def cross_work(
    model: Model, num_sequences: int, num_queries: int, length: int, device: torch.device, dtype: torch.dtype
) -> Work:
    starts = range(0, num_sequences * num_queries + 1, num_queries)
    lengths = [length] * num_sequences

    def make() -> Made:
        caches, tables, dense = _paged(model, num_sequences, length, device, dtype)
        query = random(num_sequences * num_queries, model.num_heads, model.dim, device=device, dtype=dtype)
        batch = AttentionBatch.build(tables, starts, lengths, is_causal=False)
        arguments = _arguments(model, query, caches, batch)
        peers = dense_attention(query, dense, starts, lengths, is_causal=False, is_compiled=False)
        return Made(partial(cross_attention, **arguments), arguments, peers)

    num_bytes = _bytes(model, num_sequences * num_queries, num_sequences * length, dtype.itemsize)
    flops = _flops(model, num_sequences * num_queries * length)
    return Work("cross_attention", f"{num_sequences} x {num_queries} over {length}", num_bytes, flops, make)


def encoder_work(model: Model, num_sequences: int, length: int, device: torch.device, dtype: torch.dtype) -> Work:
    count = num_sequences * length
    starts, lengths = range(0, count + 1, length), [length] * num_sequences

    def make() -> Made:
        query = random(count, model.num_heads, model.dim, device=device, dtype=dtype)
        key, value = (random(count, model.num_kv_heads, model.dim, device=device, dtype=dtype) for _ in range(2))
        dense = [
            part.view(num_sequences, length, *part.shape[1:]).transpose(1, 2).contiguous() for part in (key, value)
        ]
        arguments: dict[str, Any] = {
            "query": query,
            "key": key,
            "value": value,
            "batch": AttentionBatch.ragged(lengths),
        }
        arguments |= {"scale": model.dim**-0.5}
        peers = dense_attention(query, dense, starts, lengths, is_causal=False, is_compiled=False)
        return Made(partial(encoder_attention, **arguments), arguments, peers)

    num_bytes = _bytes(model, count, count, dtype.itemsize)
    return Work("encoder_attention", f"{num_sequences} x {length}", num_bytes, _flops(model, count * length), make)
