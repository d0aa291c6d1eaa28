"""The definitions: add_lora and its embedding form token by token, the operators block by block, from the pages."""

from __future__ import annotations

import torch

from kernels.lora.layout import PAGE_RANKS, Epilogue, ModuleGroup, PagedModule
from kernels.lora.segments import AdapterSegments


def gather_a(module: PagedModule, slot: int) -> torch.Tensor:
    """A [rank, in] of one slot, a copy."""
    return _gather(module, slot, int(module.first[slot]), module.in_features)


def gather_b(module: PagedModule, slot: int) -> torch.Tensor:
    """B [rank, out] of one slot, a copy."""
    num_a_pages = -(-int(module.rank[slot]) // PAGE_RANKS) * -(-module.in_features // module.pages.shape[2])
    return _gather(module, slot, int(module.first[slot]) + num_a_pages, module.out_features)


def gather(module: PagedModule, slot: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A [rank, in] and B [rank, out] of one slot, copies."""
    return gather_a(module, slot), gather_b(module, slot)


def _gather(module: PagedModule, slot: int, first: int, width: int) -> torch.Tensor:
    rank, tile_width = int(module.rank[slot]), module.pages.shape[2]
    num_groups, num_tiles = -(-rank // PAGE_RANKS), -(-width // tile_width)
    ids = module.page_ids[first : first + num_groups * num_tiles].long()
    tiles = module.pages[ids].view(num_groups, num_tiles, PAGE_RANKS, tile_width).transpose(1, 2)
    return tiles.reshape(num_groups * PAGE_RANKS, num_tiles * tile_width)[:rank, :width]


def add_lora(y: torch.Tensor, x: torch.Tensor, module: PagedModule, token_slots: torch.Tensor) -> None:
    """y[t] += scaling[s] * (x[t] @ A[s].T) @ B[s], s = token_slots[t], in fp32, rounded once."""
    for token, slot in enumerate(token_slots.tolist()):
        if slot < 0 or int(module.rank[slot]) == 0:
            continue
        a, b = gather(module, slot)
        delta = (x[token].float() @ a.float().T) @ b.float() * module.scaling[slot]
        y[token] = (y[token].float() + delta).to(y.dtype)


def add_lora_embedding(
    y: torch.Tensor, token_ids: torch.Tensor, module: PagedModule, token_slots: torch.Tensor
) -> None:
    """y[t] += scaling[s] * A[s][:, token_ids[t]] @ B[s], s = token_slots[t], in fp32, rounded once."""
    for token, slot in enumerate(token_slots.tolist()):
        if slot < 0 or int(module.rank[slot]) == 0:
            continue
        a, b = gather(module, slot)
        delta = a[:, int(token_ids[token])].float() @ b.float() * module.scaling[slot]
        y[token] = (y[token].float() + delta).to(y.dtype)


def groups(segments: AdapterSegments) -> list[tuple[int, torch.Tensor]]:
    """Slot and tokens of each block that is in use."""
    blocks = zip(segments.block_slot.tolist(), segments.block_start.tolist(), segments.block_end.tolist(), strict=True)
    return [(slot, segments.order[start:end].long()) for slot, start, end in blocks if 0 <= slot < segments.num_slots]


def shrink(
    x: torch.Tensor, h: torch.Tensor, group: ModuleGroup, segments: AdapterSegments, *, scaling: float = 1.0
) -> None:
    """h[m, t, :rank] = scaling * x[t] @ A[m, s].T in fp32, s the slot of token t. h is [modules, T, width]."""
    for slot, tokens in groups(segments):
        for index in range(group.num_modules):
            a, _ = gather(group.module(index), slot)
            rank = a.shape[0]
            check_room(slot, rank, h)
            h[index, tokens, :rank] = x[tokens].float() @ a.float().T * scaling


def embed(token_ids: torch.Tensor, h: torch.Tensor, module: PagedModule, segments: AdapterSegments) -> None:
    """h[t, :rank] = A[s][:, token_ids[t]], s the slot of token t. h is [T, width]; ids outside A give NaN."""
    for slot, tokens in groups(segments):
        a, _ = gather(module, slot)
        rank = a.shape[0]
        check_room(slot, rank, h)
        ids = token_ids[tokens].long()
        is_known = (ids >= 0) & (ids < module.in_features)
        columns = a[:, ids.where(is_known, 0)].T.float()
        h[tokens, :rank] = columns.masked_fill(~is_known[:, None], float("nan"))


def expand(
    h: torch.Tensor,
    y: torch.Tensor,
    group: ModuleGroup,
    segments: AdapterSegments,
    *,
    add_inputs: bool,
    epilogue: Epilogue | None = None,
) -> None:
    """y[t, columns of module] (+)= scaling[module, s] * h[module, t, :rank] @ B[module, s] in fp32, rounded once.

    h is rounded to the dtype of the weights before it is multiplied.
    """
    if not add_inputs:
        y.zero_()
    for slot, tokens in groups(segments):
        column = 0
        for index, features in enumerate(group.out_features):
            module = group.module(index)
            _, b = gather(module, slot)
            check_room(slot, b.shape[0], h)
            columns = slice(column, column + features)
            column += features
            if b.shape[0]:
                delta = h[index, tokens, : b.shape[0]].to(b.dtype).float() @ b.float()
                lora_bias = dora_scale = None
                if epilogue is not None:
                    lora_bias = vector(epilogue, epilogue.lora_bias, group, index, slot)
                    dora_scale = vector(epilogue, epilogue.dora_scale, group, index, slot)
                if lora_bias is not None:
                    delta += lora_bias
                total = y[tokens, columns].float() + delta * module.scaling[slot]
                if dora_scale is not None:
                    own = 0.0 if epilogue is None or epilogue.base_bias is None else epilogue.base_bias[columns]
                    total = dora_scale * (total - own) + own
                y[tokens, columns] = total.to(y.dtype)


def vector(
    epilogue: Epilogue, starts: torch.Tensor | None, group: ModuleGroup, index: int, slot: int
) -> torch.Tensor | None:
    """float32 [out] of a module and slot by one table of the epilogue, or None where it has none."""
    if starts is None or int(starts[index, slot]) < 0:
        return None
    at = int(starts[index, slot]) + torch.arange(group.out_features[index], device=starts.device)
    size = epilogue.values.shape[1]
    return epilogue.values[group.page_ids[at // size].long(), at % size]


def check_room(slot: int, rank: int, h: torch.Tensor) -> None:
    """Raises ValueError where the last size of h is below the rank."""
    if rank > h.shape[-1]:
        raise ValueError(f"slot {slot} has rank {rank}, h has room for {h.shape[-1]}")
