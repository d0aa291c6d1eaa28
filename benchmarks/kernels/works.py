"""What the benchmark runs: every op at the shapes of an 8B Llama on a GPU, and at small ones on the CPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any

import torch
from torch.nn.functional import rms_norm as torch_rms_norm
from torch.nn.functional import scaled_dot_product_attention, silu

from benchmarks.kernels.measure import Call
from kernels.copy_blocks import copy_blocks
from kernels.gated_activation import gated_activation
from kernels.lora import Route, SiteGroup, add_lora, add_lora_group, cases, lora_route
from kernels.paged_attention import AttentionBatch, paged_attention
from kernels.rms_norm import rms_norm
from kernels.rope import apply_rope_and_store_kv
from kernels.store_kv import store_kv

ROTATED_BYTES = 256 << 20  # copies of the inputs until together they are larger than any cache
MAX_COPIES = 8
BLOCK_SIZE = 16


@dataclass(slots=True)
class Work:
    """One row of the table. Calls are made by functions of nothing, one per copy of the inputs."""

    op: str
    name: str
    num_bytes: int  # that must be moved once
    flops: int
    make: Callable[[], tuple[Call, dict[str, Call]]]  # ours, and peers by name, over inputs of their own
    calls: dict[str, list[Call]] = field(default_factory=dict)

    def prepare(self) -> dict[str, list[Call]]:
        """Inputs and calls; as many copies as it takes to rotate."""
        copies = min(max(-(-ROTATED_BYTES // max(self.num_bytes, 1)), 1), MAX_COPIES)
        for _ in range(copies):
            ours, peers = self.make()
            for name, call in {"ours": ours, **peers}.items():
                self.calls.setdefault(name, []).append(call)
        return self.calls


@dataclass(frozen=True, slots=True)
class Model:
    """Sizes of the base model whose layers are timed."""

    hidden: int
    intermediate: int
    num_heads: int
    num_kv_heads: int
    dim: int


LLAMA_8B = Model(4096, 14336, 32, 8, 128)
SMALL = Model(1024, 2816, 16, 8, 64)


def works(device: torch.device, dtype: torch.dtype, *, is_short: bool) -> Iterator[Work]:
    """All rows, one after the other, so that only one row's inputs are in memory."""
    is_gpu = device.type == "cuda"
    model = LLAMA_8B if is_gpu else SMALL
    tokens = (64, 8192) if is_gpu else (32, 256)
    for count in tokens:
        yield _store(model, count, device, dtype)
        yield _rope(model, count, device, dtype)
        yield _norm(model, count, device, dtype)
        yield _gate(model, count, device, dtype)
    yield _copies(model, 32 if is_gpu else 2, device, dtype)
    decodes = [(64, 1024), (256, 1024), (8, 4096), (1, 1024)] if is_gpu else [(32, 1024), (8, 512)]
    for num_sequences, length in decodes[: 3 if is_short else None]:
        yield _decode(model, num_sequences, length, device, dtype)
    prefills = [(8192, 0), (512, 8192), (2048, 0)] if is_gpu else [(256, 0), (64, 512)]
    for num_queries, prefix in prefills[: 2 if is_short else None]:
        yield _prefill(model, num_queries, prefix, device, dtype)
    adapters = [(64, 64, 64), (8, 16, 64), (33, 16, 33), (8, 16, 2048)] if is_gpu else [(16, 32, 32)]
    for num_adapters, rank, num_tokens in adapters[: 2 if is_short else None]:
        yield _lora(model.hidden, num_adapters, rank, num_tokens, device, dtype)


def _random(*shape: int, device: torch.device, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(*shape, device=device, dtype=dtype)


def _store(model: Model, count: int, device: torch.device, dtype: torch.dtype) -> Work:
    shape = (model.num_kv_heads, model.dim)

    def make() -> tuple[Call, dict[str, Call]]:
        key, value = (_random(count, *shape, device=device, dtype=dtype) for _ in range(2))
        caches = [torch.zeros(2 * count // BLOCK_SIZE, BLOCK_SIZE, *shape, device=device, dtype=dtype) for _ in "kv"]
        slots = torch.randperm(2 * count, device=device)[:count]
        flat = [cache.view(-1, *shape) for cache in caches]

        def peer() -> None:
            flat[0].index_copy_(0, slots, key)
            flat[1].index_copy_(0, slots, value)

        return lambda: store_kv(key, value, caches[0], caches[1], slots), {"index_copy": peer}

    return Work("store_kv", f"{count} tokens", 4 * count * model.num_kv_heads * model.dim * dtype.itemsize, 0, make)


def _rope(model: Model, count: int, device: torch.device, dtype: torch.dtype) -> Work:
    shape = (model.num_kv_heads, model.dim)

    def make() -> tuple[Call, dict[str, Call]]:
        query = _random(count, model.num_heads, model.dim, device=device, dtype=dtype)
        key, value = (_random(count, *shape, device=device, dtype=dtype) for _ in range(2))
        angles = torch.arange(count, device=device)[:, None] * torch.rand(model.dim // 2, device=device)
        caches = [torch.zeros(2 * count // BLOCK_SIZE, BLOCK_SIZE, *shape, device=device, dtype=dtype) for _ in "kv"]
        positions, slots = torch.arange(count, device=device), torch.randperm(2 * count, device=device)[:count]
        tables = (angles.cos(), angles.sin())
        return lambda: apply_rope_and_store_kv(query, key, value, positions, *tables, caches[0], caches[1], slots), {}

    values = 2 * model.num_heads + 5 * model.num_kv_heads
    return Work("rope_and_store_kv", f"{count} tokens", count * values * model.dim * dtype.itemsize, 0, make)


def _norm(model: Model, count: int, device: torch.device, dtype: torch.dtype) -> Work:
    def make() -> tuple[Call, dict[str, Call]]:
        x, residual = (_random(count, model.hidden, device=device, dtype=dtype) for _ in range(2))
        weight = torch.ones(model.hidden, device=device, dtype=dtype)
        zero = torch.zeros_like(x)  # keeps the residual's values bounded over many calls

        def peer() -> None:
            residual.add_(zero)
            torch_rms_norm(residual, (model.hidden,), weight, 1e-5)

        return lambda: rms_norm(zero, weight, 1e-5, residual=residual), {"add, rms_norm": peer}

    return Work("rms_norm", f"{count} tokens, residual", 4 * count * model.hidden * dtype.itemsize, 0, make)


def _gate(model: Model, count: int, device: torch.device, dtype: torch.dtype) -> Work:
    def make() -> tuple[Call, dict[str, Call]]:
        x = _random(count, 2 * model.intermediate, device=device, dtype=dtype)
        gate, up = x.chunk(2, dim=1)
        return lambda: gated_activation(x, "silu"), {"silu, mul": lambda: silu(gate) * up}

    return Work("gated_activation", f"{count} tokens, silu", 3 * count * model.intermediate * dtype.itemsize, 0, make)


def _copies(model: Model, num_layers: int, device: torch.device, dtype: torch.dtype) -> Work:
    num_pairs = 16
    shape = (2 * num_pairs, BLOCK_SIZE, model.num_kv_heads, model.dim)

    def make() -> tuple[Call, dict[str, Call]]:
        caches = [torch.zeros(shape, device=device, dtype=dtype) for _ in range(2 * num_layers)]
        pairs = torch.arange(2 * num_pairs).view(2, num_pairs).T.contiguous()
        there = pairs.to(device)

        def peer() -> None:
            for cache in caches:
                cache.index_copy_(0, there[:, 1], cache[there[:, 0]])

        return lambda: copy_blocks(caches, pairs), {"index_copy": peer}

    num_bytes = 2 * 2 * num_layers * num_pairs * BLOCK_SIZE * model.num_kv_heads * model.dim * dtype.itemsize
    return Work("copy_blocks", f"{num_pairs} pairs, {num_layers} layers", num_bytes, 0, make)


def _paged(
    model: Model, num_sequences: int, length: int, device: torch.device, dtype: torch.dtype
) -> tuple[list[torch.Tensor], torch.Tensor, list[torch.Tensor]]:
    """Caches, block tables on the host, and the same keys and values as [num_sequences, Hkv, length, D]."""
    width = -(-length // BLOCK_SIZE)
    shape = (num_sequences * width, BLOCK_SIZE, model.num_kv_heads, model.dim)
    caches = [_random(*shape, device=device, dtype=dtype) for _ in range(2)]
    tables = torch.randperm(num_sequences * width).view(num_sequences, width).int()
    order = tables.flatten().long().to(device)
    dense = [cache[order].view(num_sequences, -1, *shape[2:])[:, :length].transpose(1, 2) for cache in caches]
    return caches, tables, [part.contiguous() for part in dense]


def _decode(model: Model, num_sequences: int, length: int, device: torch.device, dtype: torch.dtype) -> Work:
    def make() -> tuple[Call, dict[str, Call]]:
        caches, tables, dense = _paged(model, num_sequences, length, device, dtype)
        query = _random(num_sequences, model.num_heads, model.dim, device=device, dtype=dtype)
        batch = AttentionBatch.build(tables, range(num_sequences + 1), [length] * num_sequences)
        scale = model.dim**-0.5
        return lambda: paged_attention(query, caches[0], caches[1], batch, scale=scale), {
            "SDPA, contiguous": lambda: scaled_dot_product_attention(
                query[:, :, None], dense[0], dense[1], enable_gqa=True
            )
        }

    values = num_sequences * model.dim * (2 * length * model.num_kv_heads + 2 * model.num_heads)
    flops = 4 * num_sequences * model.num_heads * model.dim * length
    return Work("paged_attention", f"decode {num_sequences} x {length}", values * dtype.itemsize, flops, make)


def _prefill(model: Model, num_queries: int, prefix: int, device: torch.device, dtype: torch.dtype) -> Work:
    length = prefix + num_queries

    def make() -> tuple[Call, dict[str, Call]]:
        caches, tables, dense = _paged(model, 1, length, device, dtype)
        query = _random(num_queries, model.num_heads, model.dim, device=device, dtype=dtype)
        batch = AttentionBatch.build(tables, [0, num_queries], [length])
        scale = model.dim**-0.5
        rows = query.transpose(0, 1)[None]
        peers: dict[str, Call] = {}
        if prefix == 0:
            peers["SDPA, contiguous"] = lambda: scaled_dot_product_attention(
                rows, dense[0], dense[1], is_causal=True, enable_gqa=True
            )
        return lambda: paged_attention(query, caches[0], caches[1], batch, scale=scale), peers

    pairs = num_queries * prefix + num_queries * (num_queries + 1) // 2
    values = model.dim * (2 * length * model.num_kv_heads + 2 * num_queries * model.num_heads)
    flops = 4 * model.num_heads * model.dim * pairs
    return Work("paged_attention", f"prefill {num_queries} after {prefix}", values * dtype.itemsize, flops, make)


def _lora(hidden: int, num_adapters: int, rank: int, count: int, device: torch.device, dtype: torch.dtype) -> Work:
    """One square site. On a GPU the paged weights; on the CPU the stacked ones."""
    slots = tuple(sorted(token % num_adapters for token in range(count)))
    case = cases.Case("bench", slots, (rank,) * num_adapters, hidden, hidden, 256)

    def make() -> tuple[Call, dict[str, Call]]:
        inputs = cases.make(case, dtype)
        base = _random(hidden, hidden, device=device, dtype=dtype)
        x, y, token_slots = (tensor.to(device) for tensor in (inputs.x, inputs.y, inputs.token_slots))
        peers: dict[str, Call] = {"mm of the base": lambda: torch.mm(x, base)}
        if count % num_adapters == 0:
            a = torch.stack([a for a, _, _ in inputs.matrices]).to(device).transpose(1, 2)
            b = torch.stack([b for _, b, _ in inputs.matrices]).to(device)
            grouped = x.view(num_adapters, -1, hidden)
            sums = y.clone().view(num_adapters, -1, hidden)
            peers["two bmm"] = lambda: sums.baddbmm_(torch.bmm(grouped, a), b, beta=0.5)
        if device.type != "cuda":
            route = Route.build(inputs.token_slots, device)
            return lambda: add_lora(y, x, inputs.stacked, route), peers
        group = SiteGroup.of([to_device(inputs.paged, device)])
        on_device = lora_route(token_slots, num_adapters)
        return lambda: add_lora_group(y, x, group, on_device, max_rank=rank), peers

    values = 2 * num_adapters * rank * hidden + 3 * count * hidden
    flops = 4 * count * rank * hidden
    name = f"{num_adapters} of rank {rank}, {count} tokens, {hidden}"
    return Work("add_lora", name, values * dtype.itemsize, flops, make)


def to_device(value: Any, device: torch.device) -> Any:
    """The dataclass with every tensor in it on the device."""
    if isinstance(value, torch.Tensor):
        return value.to(device)
    if is_dataclass(value) and not isinstance(value, type):
        return type(value)(*(to_device(getattr(value, item.name), device) for item in fields(value)))
    return value
