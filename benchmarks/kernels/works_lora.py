"""Rows of the adapters' products from the arena's pages: one square module, its shrink and its expand alone, a group of
modules, an embedding, and operators that expand what they read.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.nn.utils.rnn import pad_sequence

from benchmarks.kernels.measure import Call
from benchmarks.kernels.torch_peers import batched_products, grouped_products, scale
from benchmarks.kernels.work import NUM_SLOTS, Made, Model, Work, random
from kernels.cases import to_device
from kernels.gated_activation import gated_activation
from kernels.lora import (
    AdapterSegments,
    ModuleGroup,
    adapter_segments,
    add_lora_group,
    cases,
    lora_embed,
    lora_expand,
    lora_shrink,
    reference,
    segments_on_host,
)
from kernels.lora.expansion import Expansion

# Columns of a page of an 8B Llama.
PAGE = 1024
VOCAB = 2048  # of the embedding; a gather costs the same from a larger one


def works(model: Model, device: torch.device, dtype: torch.dtype, *, is_short: bool) -> Iterator[Work]:
    is_gpu = device.type == "cuda"
    adapters = [(64, 64, 64), (8, 16, 64), (33, 16, 33), (8, 16, 2048)] if is_gpu else [(16, 32, 32), (64, 16, 64)]
    for num_adapters, rank, count in adapters[: 2 if is_short else None]:
        yield module_work(model.hidden, num_adapters, rank, count, device, dtype)
    half = (8, 16, 64) if is_gpu else (16, 32, 32)
    for is_expand in (False, True):
        yield half_work(model.hidden, *half, device, dtype, is_expand=is_expand)
    # The same bytes in unequal ranks: 32 adapters of rank 16 and one of rank 64, beside 36 of rank 16.
    yield mixed_work(model.hidden, (16,) * 32 + (64,), device, dtype)
    yield mixed_work(model.hidden, (16,) * 36, device, dtype)
    yield group_work(model, *half, device, dtype)
    for num_adapters in (8, 64) if is_gpu else (16,):
        yield gate_work(model, num_adapters, 16, 64 if is_gpu else 32, device, dtype)
    yield embedding_work(model, *((64, 64, 64) if is_gpu else (16, 32, 32)), device, dtype)


def _segments(token_slots: torch.Tensor, num_adapters: int) -> AdapterSegments:
    """As the arena makes it for the device."""
    if token_slots.is_cuda:
        return adapter_segments(token_slots, NUM_SLOTS, num_groups=num_adapters)
    return segments_on_host(token_slots.numpy(), NUM_SLOTS)


def _resident(group: ModuleGroup, device: torch.device) -> ModuleGroup:
    """The group on the device, in a table of as many slots as the engine's."""
    there: ModuleGroup = to_device(cases.in_table_of(group, NUM_SLOTS), device)
    return there


@dataclass(frozen=True, slots=True)
class _Dense:
    """The matrices of a group's pages, for peers: by module, smaller ranks filled up with zeros."""

    a: list[torch.Tensor]  # [n, rank, in]
    b: list[torch.Tensor]  # [n, rank, out]
    scaling: torch.Tensor  # float32 [n], the same at every module

    @classmethod
    def of(cls, group: ModuleGroup, device: torch.device) -> _Dense:
        a: list[torch.Tensor] = []
        b: list[torch.Tensor] = []
        for index in range(group.num_modules):
            pairs = [reference.gather(group.module(index), slot) for slot in range(group.num_slots)]
            for stacks, part in ((a, 0), (b, 1)):
                stacks.append(pad_sequence([pair[part] for pair in pairs], batch_first=True).to(device))
        return cls(a, b, group.scaling[0].to(device))


def _sorted_slots(num_adapters: int, count: int) -> tuple[int, ...]:
    return tuple(sorted(token % num_adapters for token in range(count)))


def module_work(
    hidden: int, num_adapters: int, rank: int, count: int, device: torch.device, dtype: torch.dtype
) -> Work:
    """One square module."""
    slots = _sorted_slots(num_adapters, count)
    case = cases.Case("bench", slots, (rank,) * num_adapters, hidden, hidden, PAGE)

    def make() -> Made:
        inputs = cases.make(case, dtype)
        base = random(hidden, hidden, device=device, dtype=dtype)
        x, y, token_slots = (tensor.to(device) for tensor in (inputs.x, inputs.y, inputs.token_slots))
        group = ModuleGroup.of([inputs.paged])
        dense = _Dense.of(group, device)
        a, b = dense.a[0], dense.b[0]
        peers: dict[str, Call] = {"mm of the base": lambda: torch.mm(x, base)}
        ends = [sum(slot <= last for slot in slots) for last in range(num_adapters)]
        peers |= grouped_products(x, y.clone(), a.transpose(1, 2), scale(dense.b, dense.scaling)[0], ends)
        peers |= batched_products(x, y, dense.a, dense.b, dense.scaling)
        arguments = {"y": y, "x": x, "a": a, "b": b, "scaling": dense.scaling, "token_slots": token_slots}
        ours = partial(
            add_lora_group, y, x, _resident(group, device), _segments(token_slots, num_adapters), max_rank=rank
        )
        return Made(ours, arguments, peers, (y,))

    values = 2 * num_adapters * rank * hidden + 3 * count * hidden
    name = f"{num_adapters} of rank {rank}, {count} tokens, {hidden}"
    return Work("add_lora", name, values * dtype.itemsize, 4 * count * rank * hidden, make)


def half_work(
    hidden: int,
    num_adapters: int,
    rank: int,
    count: int,
    device: torch.device,
    dtype: torch.dtype,
    *,
    is_expand: bool,
) -> Work:
    """The shrink or the expand of one square module alone."""
    case = cases.Case("bench", _sorted_slots(num_adapters, count), (rank,) * num_adapters, hidden, hidden, PAGE)

    def make() -> Made:
        inputs = cases.make(case, dtype)
        x, y, token_slots = (tensor.to(device) for tensor in (inputs.x, inputs.y, inputs.token_slots))
        dense = _Dense.of(ModuleGroup.of([inputs.paged]), device)
        group, segments = _resident(ModuleGroup.of([inputs.paged]), device), _segments(token_slots, num_adapters)
        h = lora_shrink(x, group, segments, max_rank=rank)
        stacked, rows = dense.a[0].transpose(1, 2), x.view(num_adapters, -1, hidden)
        if not is_expand:
            peers: dict[str, Call] = {"bmm": lambda: torch.bmm(rows, stacked)}
            arguments: dict[str, Any] = {"x": x, "a": dense.a[0], "token_slots": token_slots}
            ours = partial(lora_shrink, x, group, segments, max_rank=rank)
            return Made(ours, arguments, peers, compared=lambda planes: planes.sum(0)[0, :, :rank])
        whole = h.sum(0)[0, :, :rank].contiguous()
        parts, sums = (value.view(num_adapters, -1, value.shape[1]) for value in (whole.to(dtype), y.clone()))
        matrix = scale(dense.b, dense.scaling)[0]
        peers = {"bmm": lambda: sums.baddbmm_(parts, matrix)}
        arguments = {"h": whole, "b": dense.b[0], "scaling": dense.scaling, "y": y, "token_slots": token_slots}
        return Made(partial(lora_expand, h, group, y, segments), arguments, peers, (y,))

    values = num_adapters * rank * hidden + count * hidden * (2 if is_expand else 1)
    op = "lora_expand" if is_expand else "lora_shrink"
    name = f"{num_adapters} of rank {rank}, {count} tokens, {hidden}"
    num_bytes = values * dtype.itemsize + 4 * count * rank
    return Work(op, name, num_bytes, 2 * count * rank * hidden, make)


def mixed_work(hidden: int, ranks: tuple[int, ...], device: torch.device, dtype: torch.dtype) -> Work:
    """One token of each adapter. Peers get all ranks filled up to the greatest."""
    case = cases.Case("bench", tuple(range(len(ranks))), ranks, hidden, hidden, PAGE)

    def make() -> Made:
        inputs = cases.make(case, dtype)
        x, y, token_slots = (tensor.to(device) for tensor in (inputs.x, inputs.y, inputs.token_slots))
        group = ModuleGroup.of([inputs.paged])
        dense = _Dense.of(group, device)
        on_device = _segments(token_slots, len(ranks))
        ours = partial(add_lora_group, y, x, _resident(group, device), on_device, max_rank=max(ranks))
        arguments = {"y": y, "x": x, "a": dense.a[0], "b": dense.b[0], "scaling": dense.scaling}
        peers = batched_products(x, y, dense.a, dense.b, dense.scaling)
        return Made(ours, arguments | {"token_slots": token_slots}, peers, (y,))

    values = 2 * sum(ranks) * hidden + 3 * len(ranks) * hidden
    different = sorted(set(ranks))
    name = " + ".join(f"{ranks.count(rank)} of rank {rank}" for rank in different) + f", {hidden}"
    return Work("add_lora", name, values * dtype.itemsize, 4 * sum(ranks) * hidden, make)


def group_work(
    model: Model, num_adapters: int, rank: int, count: int, device: torch.device, dtype: torch.dtype
) -> Work:
    """q, k and v at once."""
    widths = (model.hidden, model.num_kv_heads * model.dim, model.num_kv_heads * model.dim)
    slots = _sorted_slots(num_adapters, count)
    case = cases.Case("bench", slots, (rank,) * num_adapters, model.hidden, sum(widths), PAGE)

    def make() -> Made:
        inputs = cases.make_group(case, widths, dtype, is_uniform=True)
        x, token_slots = inputs.x.to(device), inputs.token_slots.to(device)
        y = random(count, sum(widths), device=device, dtype=dtype)
        dense = _Dense.of(inputs.group, device)
        on_device = _segments(token_slots, num_adapters)
        ours = partial(add_lora_group, y, x, _resident(inputs.group, device), on_device, max_rank=rank)
        arguments = {"y": y, "x": x, "a": dense.a, "b": dense.b, "scaling": dense.scaling, "token_slots": token_slots}
        return Made(ours, arguments, batched_products(x, y, dense.a, dense.b, dense.scaling), (y,))

    values = num_adapters * rank * (3 * model.hidden + sum(widths)) + count * (model.hidden + 2 * sum(widths))
    flops = 2 * count * rank * (3 * model.hidden + sum(widths))
    name = f"q, k, v: {num_adapters} of rank {rank}, {count} tokens"
    return Work("add_lora_group", name, values * dtype.itemsize, flops, make)


def gate_work(model: Model, num_adapters: int, rank: int, count: int, device: torch.device, dtype: torch.dtype) -> Work:
    """The gate that expands what it reads, beside the expand and then the gate: the same bits."""
    widths = (model.intermediate,) * 2
    slots = _sorted_slots(num_adapters, count)
    case = cases.Case("bench", slots, (rank,) * num_adapters, model.hidden, sum(widths), PAGE)

    def make() -> Made:
        inputs = cases.make_group(case, widths, dtype, is_uniform=True)
        group, segments = _resident(inputs.group, device), _segments(inputs.token_slots.to(device), num_adapters)
        y = random(count, sum(widths), device=device, dtype=dtype)
        h = lora_shrink(inputs.x.to(device), group, segments, max_rank=rank)
        expansion = Expansion(y, h, group, segments)

        def two_launches() -> None:
            expansion.add()
            gated_activation(y, "silu")

        return Made(
            lambda: gated_activation(y, "silu", expansion), {"y": y, "h": h}, {"two launches": two_launches}, (y,)
        )

    values = num_adapters * rank * sum(widths) + 2 * count * sum(widths)
    name = f"{num_adapters} of rank {rank}, {count} tokens"
    return Work("expand_and_gate", name, values * dtype.itemsize, 2 * count * rank * sum(widths), make)


def embedding_work(
    model: Model, num_adapters: int, rank: int, count: int, device: torch.device, dtype: torch.dtype
) -> Work:
    """A gather of each token's column of A, then the expand. As many tokens of each adapter."""
    case = cases.Case("bench", _sorted_slots(num_adapters, count), (rank,) * num_adapters, VOCAB, model.hidden, PAGE)

    def make() -> Made:
        inputs = cases.make(case, dtype)
        # Zeros: beside values of order 1 the columns of A, in ** -0.5, would hardly show.
        y, token_slots = torch.zeros_like(inputs.y, device=device), inputs.token_slots.to(device)
        token_ids = torch.randint(0, case.in_features, (count,), device=device)
        dense = _Dense.of(ModuleGroup.of([inputs.paged]), device)
        a, matrix = dense.a[0], scale(dense.b, dense.scaling)[0]
        sums = y.clone().view(num_adapters, -1, model.hidden)

        def peer() -> None:
            sums.baddbmm_(a[token_slots, :, token_ids].view(num_adapters, -1, rank), matrix)

        arguments = {"y": y, "token_ids": token_ids, "a": a, "b": dense.b[0], "scaling": dense.scaling}
        arguments |= {"token_slots": token_slots}
        group, on_device = _resident(ModuleGroup.of([inputs.paged]), device), _segments(token_slots, num_adapters)
        module = group.module(0)

        def embed_and_expand() -> None:
            lora_expand(lora_embed(token_ids, module, on_device, max_rank=rank), group, y, on_device)

        return Made(embed_and_expand, arguments, {"gather, bmm": peer}, (y,))

    values = num_adapters * rank * model.hidden + count * rank + 2 * count * model.hidden
    name = f"{num_adapters} of rank {rank}, {count} tokens"
    return Work("add_lora_embedding", name, values * dtype.itemsize, 2 * count * rank * model.hidden, make)
