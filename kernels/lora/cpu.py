"""add_lora on stacked weights: two dense products over all slots, or two per slot; its embedding form, slot by slot.

Written for the CPU, runs on any device.
"""

from __future__ import annotations

import torch

from kernels.lora.layout import Route, Segment, StackedSite

# The dense form computes every token against every stacked rank and masks; the grouped form computes only what is
# needed, but in two small products per slot. Dense while the (token, rank) pairs it wastes stay below so many per
# slot. Measured with AVX-512 and no AMX, 1024 x 1024, 1 to 16 adapters of ranks 16 to 64, 16 to 512 tokens, float32
# and bfloat16: the two meet near 400 where a slot's tokens lie side by side, near 800 where they are gathered.
WASTE_PER_RUN = 384
WASTE_PER_GATHER = 768
# AMX makes bfloat16 products that much cheaper beside the cost of a call: with 8 adapters of rank 16 at 2048 x 2048
# dense was still 2.5 times faster at 512 tokens, which wastes 7168 per slot.
AMX_FACTOR = 16
HAS_AMX = bool(torch.cpu._is_amx_tile_supported())


def add_lora(y: torch.Tensor, x: torch.Tensor, site: StackedSite, route: Route) -> None:
    """See the package."""
    if use_dense(site, route):
        add_dense(y, x, site, route)
    else:
        add_grouped(y, x, site, route)


def use_dense(site: StackedSite, route: Route) -> bool:
    """Which form is faster; decided once per step for all sites of the same columns."""
    if site.columns not in route.is_dense:
        rows = site.columns.rows_by_slot
        useful = allowed = 0
        for segment in route.segments:
            if segment.slot in rows:
                useful += segment.num_tokens * (rows[segment.slot].stop - rows[segment.slot].start)
                allowed += WASTE_PER_RUN if isinstance(segment.rows, slice) else WASTE_PER_GATHER
        if site.a.dtype == torch.bfloat16 and HAS_AMX:
            allowed *= AMX_FACTOR
        wasted = len(route.row_slots) * site.a.shape[0] - useful
        # On a GPU a launch costs more than the waste.
        route.is_dense[site.columns] = site.a.is_cuda or wasted <= allowed
    return route.is_dense[site.columns]


def add_dense(y: torch.Tensor, x: torch.Tensor, site: StackedSite, route: Route) -> None:
    """y += (mask * scaling * (x @ A_all.T)) @ B_all over the rows that have an adapter.

    Hidden products are overwritten rather than multiplied by zero: another adapter's infinity stays its own.
    """
    shrunk = torch.mm(x[route.rows], site.a.T).mul_(site.columns.scaling)
    shrunk.masked_fill_(route.hidden(site.columns), 0)
    if isinstance(route.rows, slice):
        y[route.rows].addmm_(shrunk, site.b)
    else:
        y[route.rows] = y[route.rows].addmm_(shrunk, site.b)


def add_grouped(y: torch.Tensor, x: torch.Tensor, site: StackedSite, route: Route) -> None:
    """The same, slot by slot. Tokens that lie apart are gathered once for all slots, in the order of their slots."""
    apart: list[tuple[Segment, torch.Tensor]] = []
    for segment in route.segments:
        if segment.slot not in site.columns.rows_by_slot:
            continue
        if isinstance(segment.rows, slice):
            _add_segment(y[segment.rows], x[segment.rows], site, segment.slot)
        else:
            apart.append((segment, segment.rows))
    if not apart:
        return
    rows = torch.cat([segment_rows for _, segment_rows in apart])
    inputs, sums = x[rows], y[rows]
    start = 0
    for segment, _ in apart:
        end = start + segment.num_tokens
        _add_segment(sums[start:end], inputs[start:end], site, segment.slot)
        start = end
    y[rows] = sums


def _add_segment(y: torch.Tensor, x: torch.Tensor, site: StackedSite, slot: int) -> None:
    """y += scaling * (x @ A.T) @ B in place, with the weights of one slot."""
    columns = site.columns.rows_by_slot[slot]
    y.addmm_(torch.mm(x, site.a[columns].T), site.b[columns], alpha=site.columns.scaling_by_slot[slot])


def add_lora_embedding(y: torch.Tensor, token_ids: torch.Tensor, site: StackedSite, route: Route) -> None:
    """See the package. Slot by slot: a model has one embedding, so that its calls are few."""
    for segment in route.segments:
        columns = site.columns.rows_by_slot.get(segment.slot)
        if columns is None:
            continue
        shrunk = site.a[columns].index_select(1, token_ids[segment.rows]).T
        part = y[segment.rows].addmm_(shrunk, site.b[columns], alpha=site.columns.scaling_by_slot[segment.slot])
        if not isinstance(segment.rows, slice):
            y[segment.rows] = part
