"""add_lora, the definition: token by token, from the pages."""

from __future__ import annotations

import torch

from kernels.lora.layout import PAGE_RANKS, PagedSite


def gather(site: PagedSite, slot: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A [rank, in] and B [rank, out] of one slot."""
    rank, first = int(site.rank[slot]), int(site.first[slot])
    num_groups = -(-rank // PAGE_RANKS)
    matrices = []
    for width in (site.in_features, site.out_features):
        num_tiles = width // site.pages.shape[2]
        ids = site.page_ids[first : first + num_groups * num_tiles].long()
        tiles = site.pages[ids].view(num_groups, num_tiles, PAGE_RANKS, -1)
        matrices.append(tiles.transpose(1, 2).reshape(num_groups * PAGE_RANKS, width)[:rank])
        first += num_groups * num_tiles
    return matrices[0], matrices[1]


def add_lora(y: torch.Tensor, x: torch.Tensor, site: PagedSite, token_slots: torch.Tensor) -> None:
    """y[t] += scaling[s] * (x[t] @ A[s].T) @ B[s], s = token_slots[t], in fp32, rounded once."""
    for token, slot in enumerate(token_slots.tolist()):
        if slot < 0 or int(site.rank[slot]) == 0:
            continue
        a, b = gather(site, slot)
        delta = (x[token].float() @ a.float().T) @ b.float() * site.scaling[slot]
        y[token] = (y[token].float() + delta).to(y.dtype)
