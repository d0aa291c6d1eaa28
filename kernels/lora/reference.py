"""The definitions: add_lora and its embedding form token by token, the operators block by block, from the pages."""

from __future__ import annotations

import torch

from kernels.lora.layout import PAGE_RANKS, Epilogue, PagedSite, SiteGroup
from kernels.lora.route import DeviceRoute


def gather_a(site: PagedSite, slot: int) -> torch.Tensor:
    """A [rank, in] of one slot, a copy."""
    return _gather(site, slot, int(site.first[slot]), site.in_features)


def gather_b(site: PagedSite, slot: int) -> torch.Tensor:
    """B [rank, out] of one slot, a copy."""
    num_a_pages = -(-int(site.rank[slot]) // PAGE_RANKS) * -(-site.in_features // site.pages.shape[2])
    return _gather(site, slot, int(site.first[slot]) + num_a_pages, site.out_features)


def gather(site: PagedSite, slot: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A [rank, in] and B [rank, out] of one slot, copies."""
    return gather_a(site, slot), gather_b(site, slot)


def _gather(site: PagedSite, slot: int, first: int, width: int) -> torch.Tensor:
    rank, tile_width = int(site.rank[slot]), site.pages.shape[2]
    num_groups, num_tiles = -(-rank // PAGE_RANKS), -(-width // tile_width)
    ids = site.page_ids[first : first + num_groups * num_tiles].long()
    tiles = site.pages[ids].view(num_groups, num_tiles, PAGE_RANKS, tile_width).transpose(1, 2)
    return tiles.reshape(num_groups * PAGE_RANKS, num_tiles * tile_width)[:rank, :width]


def add_lora(y: torch.Tensor, x: torch.Tensor, site: PagedSite, token_slots: torch.Tensor) -> None:
    """y[t] += scaling[s] * (x[t] @ A[s].T) @ B[s], s = token_slots[t], in fp32, rounded once."""
    for token, slot in enumerate(token_slots.tolist()):
        if slot < 0 or int(site.rank[slot]) == 0:
            continue
        a, b = gather(site, slot)
        delta = (x[token].float() @ a.float().T) @ b.float() * site.scaling[slot]
        y[token] = (y[token].float() + delta).to(y.dtype)


def add_lora_embedding(y: torch.Tensor, token_ids: torch.Tensor, site: PagedSite, token_slots: torch.Tensor) -> None:
    """y[t] += scaling[s] * A[s][:, token_ids[t]] @ B[s], s = token_slots[t], in fp32, rounded once."""
    for token, slot in enumerate(token_slots.tolist()):
        if slot < 0 or int(site.rank[slot]) == 0:
            continue
        a, b = gather(site, slot)
        delta = a[:, int(token_ids[token])].float() @ b.float() * site.scaling[slot]
        y[token] = (y[token].float() + delta).to(y.dtype)


def groups(route: DeviceRoute) -> list[tuple[int, torch.Tensor]]:
    """Slot and tokens of each block that is in use."""
    blocks = zip(route.block_slot.tolist(), route.block_start.tolist(), route.block_end.tolist(), strict=True)
    return [(slot, route.order[start:end].long()) for slot, start, end in blocks if 0 <= slot < route.num_slots]


def shrink(x: torch.Tensor, h: torch.Tensor, group: SiteGroup, route: DeviceRoute, *, scaling: float = 1.0) -> None:
    """h[site, t, :rank] = scaling * x[t] @ A[site, s].T in fp32, s the slot of token t. h is [sites, T, width]."""
    for slot, tokens in groups(route):
        for index in range(group.num_sites):
            a, _ = gather(group.site(index), slot)
            rank = a.shape[0]
            check_room(slot, rank, h)
            h[index, tokens, :rank] = x[tokens].float() @ a.float().T * scaling


def embed(token_ids: torch.Tensor, h: torch.Tensor, site: PagedSite, route: DeviceRoute) -> None:
    """h[t, :rank] = A[s][:, token_ids[t]], s the slot of token t. h is [T, width]; ids outside A give NaN."""
    for slot, tokens in groups(route):
        a, _ = gather(site, slot)
        rank = a.shape[0]
        check_room(slot, rank, h)
        ids = token_ids[tokens].long()
        is_known = (ids >= 0) & (ids < site.in_features)
        columns = a[:, ids.where(is_known, 0)].T.float()
        h[tokens, :rank] = columns.masked_fill(~is_known[:, None], float("nan"))


def expand(
    h: torch.Tensor,
    y: torch.Tensor,
    group: SiteGroup,
    route: DeviceRoute,
    *,
    add_inputs: bool,
    epilogue: Epilogue | None = None,
) -> None:
    """y[t, columns of site] (+)= scaling[site, s] * h[site, t, :rank] @ B[site, s] in fp32, rounded once.

    h is rounded to the dtype of the weights before it is multiplied.
    """
    if not add_inputs:
        y.zero_()
    for slot, tokens in groups(route):
        column = 0
        for index, features in enumerate(group.out_features):
            site = group.site(index)
            _, b = gather(site, slot)
            check_room(slot, b.shape[0], h)
            columns = slice(column, column + features)
            column += features
            if b.shape[0]:
                delta = h[index, tokens, : b.shape[0]].to(b.dtype).float() @ b.float()
                lora_bias = gain = None
                if epilogue is not None:
                    lora_bias = vector(epilogue, epilogue.lora_bias, group, index, slot)
                    gain = vector(epilogue, epilogue.gain, group, index, slot)
                if lora_bias is not None:
                    delta += lora_bias
                total = y[tokens, columns].float() + delta * site.scaling[slot]
                if gain is not None:
                    own = 0.0 if epilogue is None or epilogue.base_bias is None else epilogue.base_bias[columns]
                    total = gain * (total - own) + own
                y[tokens, columns] = total.to(y.dtype)


def vector(
    epilogue: Epilogue, starts: torch.Tensor | None, group: SiteGroup, index: int, slot: int
) -> torch.Tensor | None:
    """float32 [out] of a site and slot by one table of the epilogue, or None where it has none."""
    if starts is None or int(starts[index, slot]) < 0:
        return None
    at = int(starts[index, slot]) + torch.arange(group.out_features[index], device=starts.device)
    size = epilogue.values.shape[1]
    return epilogue.values[group.page_ids[at // size].long(), at % size]


def check_room(slot: int, rank: int, h: torch.Tensor) -> None:
    """Raises ValueError where the last size of h is below the rank."""
    if rank > h.shape[-1]:
        raise ValueError(f"slot {slot} has rank {rank}, h has room for {h.shape[-1]}")
