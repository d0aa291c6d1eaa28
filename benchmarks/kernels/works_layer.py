"""Rows of the ops around a layer's products: cache writes, rotation, norm, gate, moves of blocks; products of
few rows and in FP8."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.nn.functional import linear, rms_norm as torch_rms_norm, silu

from benchmarks.kernels.work import BLOCK_SIZE, Made, Model, Work, random
from kernels.copy_blocks import copy_blocks
from kernels.fp8 import FP8, fp8_refusal
from kernels.fp8_linear import fp8_linear
from kernels.fp8_rows import quantize_rows
from kernels.gated_activation import gated_activation, gated_activation_fp8
from kernels.linear import row_linear, rows_linear
from kernels.rms_norm import rms_norm, rms_norm_fp8
from kernels.rope import HeadNorm, apply_rope_and_store_kv
from kernels.store_kv import store_kv
from kernels.swap_blocks import BlockSwaps

NUM_PAIRS = 16  # blocks copied or swapped


def works(model: Model, device: torch.device, dtype: torch.dtype, *, is_short: bool) -> Iterator[Work]:
    is_gpu = device.type == "cuda"
    for count in (64, 8192) if is_gpu else (32, 256):
        yield _store(model, count, device, dtype)
        if fp8_refusal(device) is None:
            yield store_fp8_work(model, count, device, dtype, per_token_head=False)
            if not is_short:
                yield store_fp8_work(model, count, device, dtype, per_token_head=True)
        yield _rope(model, count, device, dtype, has_norm=False)
        yield _rope(model, count, device, dtype, has_norm=True)
        yield norm_work(model, count, device, dtype)
        yield _gate(model, count, device, dtype)
    for count in (1, 64) if is_gpu else (1, 4):
        yield row_work(count, model.hidden, 2 * model.intermediate, device, dtype)
        if not is_short:
            yield row_work(count, model.hidden, model.hidden, device, dtype)
            yield row_work(count, model.intermediate, model.hidden, device, dtype)
            yield row_work(count, model.hidden, model.vocab, device, dtype)
    yield from _fp8(model, device, dtype, is_short=is_short)
    num_layers = 32 if is_gpu else 2
    yield _copies(model, num_layers, device, dtype)
    for is_out in (True, False):
        yield _swaps(model, num_layers, device, dtype, is_out=is_out)


def _caches(model: Model, count: int, device: torch.device, dtype: torch.dtype) -> list[torch.Tensor]:
    shape = (2 * count // BLOCK_SIZE, BLOCK_SIZE, model.num_kv_heads, model.dim)
    return [torch.zeros(shape, device=device, dtype=dtype) for _ in range(2)]


def _store(model: Model, count: int, device: torch.device, dtype: torch.dtype) -> Work:
    shape = (model.num_kv_heads, model.dim)

    def make() -> Made:
        key, value = (random(count, *shape, device=device, dtype=dtype) for _ in range(2))
        key_cache, value_cache = _caches(model, count, device, dtype)
        slots = torch.randperm(2 * count, device=device)[:count]

        def peer() -> None:
            key_cache.view(-1, *shape).index_copy_(0, slots, key)
            value_cache.view(-1, *shape).index_copy_(0, slots, value)

        arguments: dict[str, Any] = {"key": key, "value": value, "key_cache": key_cache, "value_cache": value_cache}
        arguments |= {"kv_positions": slots}
        return Made(lambda: store_kv(**arguments), arguments, {"index_copy": peer}, (key_cache, value_cache))

    return Work("store_kv", f"{count} tokens", 4 * count * model.num_kv_heads * model.dim * dtype.itemsize, 0, make)


def store_fp8_work(model: Model, count: int, device: torch.device, dtype: torch.dtype, *, per_token_head: bool) -> Work:
    shape = (model.num_kv_heads, model.dim)

    def make() -> Made:
        key, value = (random(count, *shape, device=device, dtype=dtype) for _ in range(2))
        key_cache, value_cache = _caches(model, count, device, FP8)
        slots = torch.randperm(2 * count, device=device)[:count]
        scales = [torch.ones(key_cache.shape[:3], device=device) if per_token_head else 0.02 for _ in range(2)]
        arguments: dict[str, Any] = {"key": key, "value": value, "key_cache": key_cache, "value_cache": value_cache}
        arguments |= {"kv_positions": slots, "key_scale": scales[0], "value_scale": scales[1]}
        return Made(lambda: store_kv(**arguments), arguments, outputs=(key_cache, value_cache))

    num_bytes = 2 * count * model.num_kv_heads * (model.dim * (dtype.itemsize + 1) + 4 * per_token_head)
    name = f"{count} tokens, FP8" + (" per token and head" if per_token_head else "")
    return Work("store_kv", name, num_bytes, 0, make)


def _rope(model: Model, count: int, device: torch.device, dtype: torch.dtype, *, has_norm: bool) -> Work:
    """Query, key and value as a fused projection leaves them."""
    heads = [model.num_heads, model.num_kv_heads, model.num_kv_heads]

    def make() -> Made:
        fused = random(count, sum(heads), model.dim, device=device, dtype=dtype)
        query, key, value = torch.split(fused, heads, dim=1)
        key_cache, value_cache = _caches(model, count, device, dtype)
        angles = torch.arange(count, device=device)[:, None] * torch.rand(model.dim // 2, device=device)
        weights = [torch.ones(model.dim, device=device, dtype=dtype) for _ in range(2)]
        arguments: dict[str, Any] = {
            "query": query,
            "key": key,
            "value": value,
            "positions": torch.arange(count, device=device),
            "cos": angles.cos(),
            "sin": angles.sin(),
            "key_cache": key_cache,
            "value_cache": value_cache,
            "kv_positions": torch.randperm(2 * count, device=device)[:count],
            "norm": HeadNorm(weights[0], weights[1], 1e-5) if has_norm else None,
        }
        return Made(lambda: apply_rope_and_store_kv(**arguments), arguments, outputs=(query, key_cache, value_cache))

    values = 2 * model.num_heads + 5 * model.num_kv_heads
    name = f"{count} tokens" + (", norms of the heads" if has_norm else "")
    return Work("rope_and_store_kv", name, count * values * model.dim * dtype.itemsize, 0, make)


def norm_work(model: Model, count: int, device: torch.device, dtype: torch.dtype) -> Work:
    def make() -> Made:
        residual = random(count, model.hidden, device=device, dtype=dtype)
        weight = torch.ones(model.hidden, device=device, dtype=dtype)
        zero = torch.zeros_like(residual)  # keeps the residual's values bounded over many calls

        def peer() -> None:
            residual.add_(zero)
            torch_rms_norm(residual, (model.hidden,), weight, 1e-5)

        arguments: dict[str, Any] = {"x": zero, "weight": weight, "eps": 1e-5, "residual": residual}
        return Made(lambda: rms_norm(**arguments), arguments, {"add, rms_norm": peer})

    return Work("rms_norm", f"{count} tokens, residual", 4 * count * model.hidden * dtype.itemsize, 0, make)


def _gate(model: Model, count: int, device: torch.device, dtype: torch.dtype) -> Work:
    def make() -> Made:
        x = random(count, 2 * model.intermediate, device=device, dtype=dtype)
        gate, up = x.chunk(2, dim=1)
        arguments: dict[str, Any] = {"x": x, "activation": "silu"}
        return Made(lambda: gated_activation(x, "silu"), arguments, {"silu, mul": lambda: silu(gate) * up})

    return Work("gated_activation", f"{count} tokens, silu", 3 * count * model.intermediate * dtype.itemsize, 0, make)


def _numbered(cache: torch.Tensor) -> torch.Tensor:
    """The cache with each block's number in the block, so that a wrong copy shows."""
    return cache.copy_(torch.arange(len(cache)).view(-1, 1, 1, 1))


def _copies(model: Model, num_layers: int, device: torch.device, dtype: torch.dtype) -> Work:
    shape = (2 * NUM_PAIRS, BLOCK_SIZE, model.num_kv_heads, model.dim)

    def make() -> Made:
        caches = [_numbered(torch.empty(shape, device=device, dtype=dtype)) for _ in range(2 * num_layers)]
        pairs = torch.arange(2 * NUM_PAIRS).view(2, NUM_PAIRS).T.contiguous()
        there = pairs.to(device)

        def peer() -> None:
            for cache in caches:
                cache.index_copy_(0, there[:, 1], cache[there[:, 0]])

        arguments = {"caches": caches, "pairs": pairs}
        return Made(lambda: copy_blocks(caches, pairs), arguments, {"index_copy": peer}, caches)

    num_bytes = 2 * 2 * num_layers * NUM_PAIRS * BLOCK_SIZE * model.num_kv_heads * model.dim * dtype.itemsize
    return Work("copy_blocks", f"{NUM_PAIRS} pairs, {num_layers} layers", num_bytes, 0, make)


def _swaps(model: Model, num_layers: int, device: torch.device, dtype: torch.dtype, *, is_out: bool) -> Work:
    """Blocks that lie apart, of every layer's keys and values. Each byte is moved once over the bus."""
    shape = (2 * NUM_PAIRS, BLOCK_SIZE, model.num_kv_heads, model.dim)
    is_gpu = device.type == "cuda"

    def make() -> Made:
        caches = [torch.zeros(shape, device=device, dtype=dtype) for _ in range(2 * num_layers)]
        hosts = [torch.zeros(shape, dtype=dtype, pin_memory=is_gpu) for _ in range(2 * num_layers)]
        for tensor in caches if is_out else hosts:
            _numbered(tensor)
        ways = list(zip(caches, hosts, strict=True)) if is_out else list(zip(hosts, caches, strict=True))
        pairs = torch.arange(0, 2 * NUM_PAIRS, 2)[:, None].expand(NUM_PAIRS, 2).contiguous()

        swaps = BlockSwaps(caches, hosts)
        swap = swaps.swap_out if is_out else swaps.swap_in

        def peer() -> None:
            for source, destination in ways:
                destination.copy_(source, non_blocking=True)

        # Whole caches, so that one copy moves twice the bytes of all of ours.
        arguments = {"ways": ways, "pairs": pairs}
        return Made(lambda: swap(pairs), arguments, {"copy of twice as much": peer}, hosts if is_out else caches)

    num_bytes = 2 * num_layers * NUM_PAIRS * BLOCK_SIZE * model.num_kv_heads * model.dim * dtype.itemsize
    way = "out" if is_out else "in"
    return Work(
        "swap_blocks", f"{way}, {NUM_PAIRS} blocks, {num_layers} layers", num_bytes * (1 if is_gpu else 2), 0, make
    )


def row_work(count: int, num_in: int, num_out: int, device: torch.device, dtype: torch.dtype) -> Work:
    op = row_linear if count == 1 else rows_linear

    def make() -> Made:
        x, weight = (random(rows, num_in, device=device, dtype=dtype) for rows in (count, num_out))
        arguments: dict[str, Any] = {"x": x, "weight": weight, "bias": None}
        return Made(lambda: op(**arguments), arguments, {"linear": lambda: linear(x, weight)})

    num_bytes = (num_in * num_out + count * (num_in + num_out)) * dtype.itemsize
    name = f"{count} row{'s' * (count > 1)}, {num_in} to {num_out}"
    return Work(op.__name__, name, num_bytes, 2 * count * num_in * num_out, make)


def _fp8(model: Model, device: torch.device, dtype: torch.dtype, *, is_short: bool) -> Iterator[Work]:
    is_gpu = device.type == "cuda"
    if is_gpu and (fp8_refusal(device) is not None or dtype != torch.bfloat16):
        return
    for count in (1, 64, 256) if is_gpu else (4,):
        yield product_work(model.hidden, 2 * model.intermediate, count, device, dtype)
        if not is_short:
            yield product_work(model.intermediate, model.hidden, count, device, dtype)
    for count in (64, 8192) if is_gpu else (32,):
        yield _norm_fp8(model, count, device, dtype)
        yield _gate_fp8(model, count, device, dtype)
        yield _fp8_rows(model, count, device, dtype)


def product_work(num_in: int, num_out: int, count: int, device: torch.device, dtype: torch.dtype) -> Work:
    """Beside the product of what the numbers stand for, in the plain dtype."""

    def make() -> Made:
        x, weight = (quantize_rows(random(rows, num_in, device=device, dtype=dtype)) for rows in (count, num_out))
        arguments: dict[str, Any] = {"x": x, "weight": weight, "bias": None, "dtype": dtype}
        plain = [rows.float().to(dtype) for rows in (x, weight)]
        return Made(lambda: fp8_linear(**arguments), arguments, {"plain linear": lambda: linear(plain[0], plain[1])})

    num_bytes = num_in * num_out + count * (num_in + num_out * dtype.itemsize)
    return Work("fp8_linear", f"{count} x {num_in} to {num_out}", num_bytes, 2 * count * num_in * num_out, make)


def _norm_fp8(model: Model, count: int, device: torch.device, dtype: torch.dtype) -> Work:
    def make() -> Made:
        x, residual = (random(count, model.hidden, device=device, dtype=dtype) for _ in range(2))
        weight = torch.ones(model.hidden, device=device, dtype=dtype)
        return Made(lambda: rms_norm_fp8(x.zero_(), weight, 1e-5, residual=residual)[0], {"x": x, "weight": weight})

    num_bytes = count * model.hidden * (4 * dtype.itemsize + 1)
    return Work("rms_norm", f"{count} tokens, residual, FP8 too", num_bytes, 0, make)


def _gate_fp8(model: Model, count: int, device: torch.device, dtype: torch.dtype) -> Work:
    def make() -> Made:
        x = random(count, 2 * model.intermediate, device=device, dtype=dtype)
        return Made(lambda: gated_activation_fp8(x, "silu")[0], {"x": x, "activation": "silu"})

    num_bytes = count * model.intermediate * (3 * dtype.itemsize + 1)
    return Work("gated_activation", f"{count} tokens, silu, FP8 too", num_bytes, 0, make)


def _fp8_rows(model: Model, count: int, device: torch.device, dtype: torch.dtype) -> Work:
    def make() -> Made:
        x = random(count, model.hidden, device=device, dtype=dtype)
        return Made(lambda: quantize_rows(x).scales, {"x": x})

    return Work("fp8_rows", f"{count} tokens", count * model.hidden * (dtype.itemsize + 1), 0, make)
