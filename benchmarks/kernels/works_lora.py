"""Rows of the adapters' products: one square site, a group of sites, an embedding; on a GPU from the arena's pages."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch

from benchmarks.kernels.measure import Call
from benchmarks.kernels.torch_peers import grouped_products
from benchmarks.kernels.work import Made, Model, Work, random, to_device
from kernels.lora import (
    Route,
    SiteGroup,
    add_lora,
    add_lora_embedding,
    add_lora_group,
    cases,
    lora_embed,
    lora_expand,
    lora_route,
)

VOCAB = 2048  # of the embedding; a gather costs the same from a larger one


def works(model: Model, device: torch.device, dtype: torch.dtype, *, is_short: bool) -> Iterator[Work]:
    is_gpu = device.type == "cuda"
    adapters = [(64, 64, 64), (8, 16, 64), (33, 16, 33), (8, 16, 2048)] if is_gpu else [(16, 32, 32)]
    for num_adapters, rank, count in adapters[: 2 if is_short else None]:
        yield _site(model.hidden, num_adapters, rank, count, device, dtype)
    if is_gpu:
        # The same bytes in unequal ranks: 32 adapters of rank 16 and one of rank 64, beside 36 of rank 16.
        yield _mixed(model.hidden, (16,) * 32 + (64,), device, dtype)
        yield _mixed(model.hidden, (16,) * 36, device, dtype)
        yield _group(model, 8, 16, 64, device, dtype)
    yield _embedding(model, *((64, 64, 64) if is_gpu else (16, 32, 32)), device, dtype)


def _site(hidden: int, num_adapters: int, rank: int, count: int, device: torch.device, dtype: torch.dtype) -> Work:
    """One square site. On a GPU the paged weights; on the CPU the stacked ones."""
    slots = tuple(sorted(token % num_adapters for token in range(count)))
    case = cases.Case("bench", slots, (rank,) * num_adapters, hidden, hidden, 256)

    def make() -> Made:
        inputs = cases.make(case, dtype)
        base = random(hidden, hidden, device=device, dtype=dtype)
        x, y, token_slots = (tensor.to(device) for tensor in (inputs.x, inputs.y, inputs.token_slots))
        a = torch.stack([a for a, _, _ in inputs.matrices]).to(device)
        b = torch.stack([b for _, b, _ in inputs.matrices]).to(device)
        scaling = torch.tensor([scaling for _, _, scaling in inputs.matrices], device=device)
        peers: dict[str, Call] = {"mm of the base": lambda: torch.mm(x, base)}
        ends = [sum(slot <= last for slot in slots) for last in range(num_adapters)]
        peers |= grouped_products(x, y.clone(), a.transpose(1, 2), b, ends)
        if count % num_adapters == 0:
            grouped, sums = x.view(num_adapters, -1, hidden), y.clone().view(num_adapters, -1, hidden)
            shrink = a.transpose(1, 2)
            peers["two bmm"] = lambda: sums.baddbmm_(torch.bmm(grouped, shrink), b, beta=0.5)
        arguments: dict[str, Any] = {"y": y, "x": x, "a": a, "b": b, "scaling": scaling, "token_slots": token_slots}
        if device.type != "cuda":
            return Made(
                partial(add_lora, y, x, inputs.stacked, Route.build(inputs.token_slots, device)), arguments, peers
            )
        group = SiteGroup.of([to_device(inputs.paged, device)])
        on_device = lora_route(token_slots, num_adapters)
        return Made(partial(add_lora_group, y, x, group, on_device, max_rank=rank), arguments, peers)

    values = 2 * num_adapters * rank * hidden + 3 * count * hidden
    name = f"{num_adapters} of rank {rank}, {count} tokens, {hidden}"
    return Work("add_lora", name, values * dtype.itemsize, 4 * count * rank * hidden, make)


def _mixed(hidden: int, ranks: tuple[int, ...], device: torch.device, dtype: torch.dtype) -> Work:
    """One token of each adapter."""
    case = cases.Case("bench", tuple(range(len(ranks))), ranks, hidden, hidden, 256)

    def make() -> Made:
        inputs = cases.make(case, dtype)
        x, y, token_slots = (tensor.to(device) for tensor in (inputs.x, inputs.y, inputs.token_slots))
        group = SiteGroup.of([to_device(inputs.paged, device)])
        on_device = lora_route(token_slots, len(ranks))
        ours = partial(add_lora_group, y, x, group, on_device, max_rank=max(ranks))
        return Made(ours, {"y": y, "x": x, "matrices": inputs.matrices, "token_slots": token_slots})

    values = 2 * sum(ranks) * hidden + 3 * len(ranks) * hidden
    different = sorted(set(ranks))
    name = " + ".join(f"{ranks.count(rank)} of rank {rank}" for rank in different) + f", {hidden}"
    return Work("add_lora", name, values * dtype.itemsize, 4 * sum(ranks) * hidden, make)


def _group(model: Model, num_adapters: int, rank: int, count: int, device: torch.device, dtype: torch.dtype) -> Work:
    """q, k and v at once."""
    widths = (model.hidden, model.num_kv_heads * model.dim, model.num_kv_heads * model.dim)
    slots = tuple(sorted(token % num_adapters for token in range(count)))
    case = cases.Case("bench", slots, (rank,) * num_adapters, model.hidden, sum(widths), 256)

    def make() -> Made:
        inputs = cases.make_group(case, widths, dtype, is_uniform=True)
        x, token_slots = inputs.x.to(device), inputs.token_slots.to(device)
        y = random(count, sum(widths), device=device, dtype=dtype)
        group = to_device(inputs.group, device)
        on_device = lora_route(token_slots, num_adapters)
        ours = partial(add_lora_group, y, x, group, on_device, max_rank=rank)
        return Made(ours, {"y": y, "x": x, "group": group, "token_slots": token_slots})

    values = num_adapters * rank * (3 * model.hidden + sum(widths)) + count * (model.hidden + 2 * sum(widths))
    flops = 2 * count * rank * (3 * model.hidden + sum(widths))
    name = f"q, k, v: {num_adapters} of rank {rank}, {count} tokens"
    return Work("add_lora_group", name, values * dtype.itemsize, flops, make)


def _embedding(
    model: Model, num_adapters: int, rank: int, count: int, device: torch.device, dtype: torch.dtype
) -> Work:
    """A gather of each token's column of A, then the expand."""
    slots = tuple(sorted(token % num_adapters for token in range(count)))
    case = cases.Case("bench", slots, (rank,) * num_adapters, VOCAB, model.hidden, 256)

    def make() -> Made:
        inputs = cases.make(case, dtype)
        y, token_slots = inputs.y.to(device), inputs.token_slots.to(device)
        token_ids = torch.randint(0, case.in_features, (count,), device=device)
        arguments: dict[str, Any] = {
            "y": y,
            "token_ids": token_ids,
            "matrices": inputs.matrices,
            "token_slots": token_slots,
        }
        if device.type != "cuda":
            route = Route.build(inputs.token_slots, device)
            return Made(partial(add_lora_embedding, y, token_ids, inputs.stacked, route), arguments)
        site = to_device(inputs.paged, device)
        group, on_device = SiteGroup.of([site]), lora_route(token_slots, num_adapters)

        def ours() -> None:
            lora_expand(lora_embed(token_ids, site, on_device, max_rank=rank), group, y, on_device)

        return Made(ours, arguments)

    values = num_adapters * rank * model.hidden + count * rank + 2 * count * model.hidden
    name = f"{num_adapters} of rank {rank}, {count} tokens"
    return Work("add_lora_embedding", name, values * dtype.itemsize, 2 * count * rank * model.hidden, make)
