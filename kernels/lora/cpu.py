"""The operators in torch, slot by slot: products in the dtype of the weights, over copies of the slot's pages.

Written for a CPU without native code, runs on any device. Tokens that follow one another in the rows are read where
they lie, others are gathered once for all modules of a group.
"""

from __future__ import annotations

import torch

from kernels.lora.layout import PAGE_RANKS, Epilogue, ModuleGroup
from kernels.lora.reference import check_room, gather_a, gather_b, vector
from kernels.lora.segments import AdapterSegments

Rows = slice | torch.Tensor


def tokens_of_slots(segments: AdapterSegments) -> list[tuple[int, Rows]]:
    """Each slot and its tokens; blocks of one slot that follow one another are one segment."""
    joined: list[tuple[int, int, int]] = []
    blocks = zip(segments.block_slot.tolist(), segments.block_start.tolist(), segments.block_end.tolist(), strict=True)
    for slot, start, end in blocks:
        if not 0 <= slot < segments.num_slots or start == end:
            continue
        if joined and joined[-1][0] == slot and joined[-1][2] == start:
            start = joined.pop()[1]
        joined.append((slot, start, end))
    return [(slot, _rows(segments.order[start:end])) for slot, start, end in joined]


def shrink(
    x: torch.Tensor, h: torch.Tensor, group: ModuleGroup, segments: AdapterSegments, *, scaling: float = 1.0
) -> None:
    """See kernels.lora.reference."""
    for slot, tokens in tokens_of_slots(segments):
        rows = x[tokens]
        for index in range(group.num_modules):
            rank = _rank(group, index, slot, h)
            if rank:
                h[index, tokens, :rank] = torch.mm(rows, gather_a(group.module(index), slot).T).float() * scaling


def embed(token_ids: torch.Tensor, h: torch.Tensor, group: ModuleGroup, segments: AdapterSegments) -> None:
    """Into h [1, T, width] of the only module; see kernels.lora.reference."""
    width = group.pages.shape[2]
    num_tiles = -(-group.in_features // width)
    for slot, tokens in tokens_of_slots(segments):
        rank, first = _rank(group, 0, slot, h), int(group.first[0, slot])
        num_groups = -(-rank // PAGE_RANKS)
        ids = token_ids[tokens].long()
        is_known = (ids >= 0) & (ids < group.in_features)
        ids = ids.where(is_known, 0)
        page_ids = group.page_ids[first : first + num_groups * num_tiles].long().view(num_groups, num_tiles)
        # [tokens, groups, 8]: one column of one tile of each group
        columns = group.pages[page_ids[:, ids // width].T, :, (ids % width)[:, None]]
        values = columns.reshape(len(ids), num_groups * PAGE_RANKS)[:, :rank].float()
        h[0, tokens, :rank] = values.masked_fill(~is_known[:, None], float("nan"))


def expand(
    h: torch.Tensor,
    y: torch.Tensor,
    group: ModuleGroup,
    segments: AdapterSegments,
    *,
    add_inputs: bool,
    epilogue: Epilogue | None = None,
) -> None:
    """See kernels.lora.reference."""
    if not add_inputs:
        y.zero_()
    for slot, tokens in tokens_of_slots(segments):
        rows, column = y[tokens], 0
        for index, features in enumerate(group.out_features):
            part = rows[:, column : column + features]
            own = epilogue.base_bias[column : column + features] if epilogue and epilogue.base_bias is not None else 0.0
            column += features
            rank = _rank(group, index, slot, h)
            if rank == 0:
                continue
            shrunk, b = h[index, tokens, :rank].to(part.dtype), gather_b(group.module(index), slot)
            scaling = float(group.scaling[index, slot])
            lora_bias = dora_scale = None
            if epilogue is not None:
                lora_bias = vector(epilogue, epilogue.lora_bias, group, index, slot)
                dora_scale = vector(epilogue, epilogue.dora_scale, group, index, slot)
            if lora_bias is None and dora_scale is None:
                part.addmm_(shrunk, b, alpha=scaling)
                continue
            delta = torch.mm(shrunk, b).float()
            total = part.float() + scaling * (delta if lora_bias is None else delta + lora_bias)
            part.copy_(total if dora_scale is None else dora_scale * (total - own) + own)
        if isinstance(tokens, torch.Tensor):
            y[tokens] = rows


def add(
    y: torch.Tensor,
    x: torch.Tensor,
    group: ModuleGroup,
    segments: AdapterSegments,
    h: torch.Tensor,
    epilogue: Epilogue | None,
) -> None:
    """Shrink into h [modules, T, width], then expand."""
    shrink(x, h, group, segments)
    expand(h, y, group, segments, add_inputs=True, epilogue=epilogue)


def _rows(tokens: torch.Tensor) -> Rows:
    """A slice where the tokens follow one another."""
    first, last = int(tokens[0]), int(tokens[-1])
    return slice(first, last + 1) if last - first + 1 == len(tokens) else tokens.long()


def _rank(group: ModuleGroup, index: int, slot: int, h: torch.Tensor) -> int:
    """Raises ValueError where h [modules, T, width] has no room for it."""
    rank = int(group.rank[index, slot])
    check_room(slot, rank, h)
    return rank
