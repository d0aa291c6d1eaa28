"""add_lora on stacked weights: two dense products over all slots, or two per slot; its embedding form, slot by slot.

Written for the CPU, runs on any device.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from kernels.lora.layout import Route, Segment, StackedSite

# The dense form computes every token against every stacked rank and masks; the grouped form computes only what is
# needed, but in two small products per slot. A slot's products cost as much as so many wasted multiplications, that is
# (token, rank) pairs times the columns of A and B. Measured on one thread, float32, 1 to 16 adapters of ranks 16 to 64,
# 1 to 512 tokens: with AVX-512 at 1024 x 1024 the forms meet near 400 pairs per slot; with AVX2 near 50 there, near 500
# at 256 x 256, near 15 at 2816 x 2816.
WASTE_AVX512 = 800_000
WASTE_OTHER = 100_000
# Where a slot's tokens lie apart they are gathered and put back, which grows with the columns as the waste does.
GATHER_PAIRS = 384
# AMX makes bfloat16 products that much cheaper beside the cost of a call: with 8 adapters of rank 16 at 2048 x 2048
# dense was still 2.5 times faster at 512 tokens, which wastes 7168 pairs per slot.
AMX_FACTOR = 16


@dataclass(frozen=True, slots=True)
class Machine:
    """What decides between the forms."""

    has_avx512: bool
    has_amx: bool
    product_dtypes: frozenset[torch.dtype]  # that torch has fast products for

    @classmethod
    def detect(cls) -> Machine:
        """The machine at hand, as torch uses it."""
        dtypes = {torch.float32}
        if torch._C._has_mkldnn:
            if torch.ops.mkldnn._is_mkldnn_bf16_supported():
                dtypes.add(torch.bfloat16)
            if torch.ops.mkldnn._is_mkldnn_fp16_supported():
                dtypes.add(torch.float16)
        is_avx512 = torch.backends.cpu.get_cpu_capability() == "AVX512"
        return cls(is_avx512, bool(torch.cpu._is_amx_tile_supported()), frozenset(dtypes))

    def waste_of_slot(self, columns: int, dtype: torch.dtype, *, is_gathered: bool) -> float:
        """(token, rank) pairs that may be computed in vain to spare one slot its own products.

        None in a dtype without fast products: with bfloat16 on AVX2 dense was up to 50 times slower than grouped.
        """
        if dtype not in self.product_dtypes:
            return 0.0
        pairs = (WASTE_AVX512 if self.has_avx512 else WASTE_OTHER) / columns + (GATHER_PAIRS if is_gathered else 0)
        return pairs * AMX_FACTOR if dtype == torch.bfloat16 and self.has_amx else pairs


MACHINE = Machine.detect()


def add_lora(y: torch.Tensor, x: torch.Tensor, parts: Sequence[tuple[slice, StackedSite]], route: Route) -> None:
    """See the package. Each site adds to its columns of y; those that are grouped share one gather of x and y."""
    grouped = []
    for columns, site in parts:
        if use_dense(site, route):
            add_dense(y[:, columns], x, site, route)
        else:
            grouped.append((columns, site))
    if grouped:
        add_grouped(y, x, grouped, route)
    for columns, site in parts:
        if site.vectors:
            add_vectors(y[:, columns], site, route)


def add_vectors(y: torch.Tensor, site: StackedSite, route: Route) -> None:
    """The biases and gains of the slots that have them, on what the products left in y."""
    for segment in route.segments:
        vectors = site.vectors.get(segment.slot)
        if vectors is None:
            continue
        part = y[segment.rows].float()
        if vectors.lora_bias is not None:
            part = part.add(vectors.lora_bias, alpha=site.columns.scaling_by_slot[segment.slot])
        if vectors.gain is not None and site.base_bias is not None:
            part = part.sub(site.base_bias).mul_(vectors.gain).add_(site.base_bias)
        elif vectors.gain is not None:
            part = part.mul(vectors.gain)
        y[segment.rows] = part.to(y.dtype)


def use_dense(site: StackedSite, route: Route) -> bool:
    """Which form is faster; decided once per step for all sites of the same columns and widths."""
    columns = site.a.shape[1] + site.b.shape[1]
    key = (site.columns, columns)
    if key not in route.is_dense:
        rows = site.columns.rows_by_slot
        useful, allowed = 0, 0.0
        for segment in route.segments:
            if segment.slot in rows:
                useful += segment.num_tokens * (rows[segment.slot].stop - rows[segment.slot].start)
                is_gathered = not isinstance(segment.rows, slice)
                allowed += MACHINE.waste_of_slot(columns, site.a.dtype, is_gathered=is_gathered)
        wasted = len(route.row_slots) * site.a.shape[0] - useful
        # On a GPU a launch costs more than the waste.
        route.is_dense[key] = site.a.is_cuda or wasted <= allowed
    return route.is_dense[key]


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


def add_grouped(y: torch.Tensor, x: torch.Tensor, parts: Sequence[tuple[slice, StackedSite]], route: Route) -> None:
    """The same, slot by slot. Tokens that lie apart are gathered once for all slots, in the order of their slots."""
    apart: list[tuple[Segment, torch.Tensor]] = []
    for segment in route.segments:
        if not any(segment.slot in site.columns.rows_by_slot for _, site in parts):
            continue
        if isinstance(segment.rows, slice):
            _add_segment(y[segment.rows], x[segment.rows], parts, segment.slot)
        else:
            apart.append((segment, segment.rows))
    if not apart:
        return
    rows = torch.cat([segment_rows for _, segment_rows in apart])
    inputs, sums = x[rows], y[rows]
    start = 0
    for segment, _ in apart:
        end = start + segment.num_tokens
        _add_segment(sums[start:end], inputs[start:end], parts, segment.slot)
        start = end
    y[rows] = sums


def _add_segment(y: torch.Tensor, x: torch.Tensor, parts: Sequence[tuple[slice, StackedSite]], slot: int) -> None:
    """y += scaling * (x @ A.T) @ B in place, with the weights of one slot."""
    for columns, site in parts:
        ranks = site.columns.rows_by_slot.get(slot)
        if ranks is not None:
            shrunk = torch.mm(x, site.a[ranks].T)
            y[:, columns].addmm_(shrunk, site.b[ranks], alpha=site.columns.scaling_by_slot[slot])


def add_lora_embedding(
    y: torch.Tensor, token_ids: torch.Tensor, site: StackedSite, route: Route, multiplier: float
) -> None:
    """See the package. Slot by slot: a model has one embedding, so that its calls are few."""
    for segment in route.segments:
        columns = site.columns.rows_by_slot.get(segment.slot)
        if columns is None:
            continue
        shrunk = site.a[columns].index_select(1, token_ids[segment.rows]).T
        alpha = multiplier * site.columns.scaling_by_slot[segment.slot]
        part = y[segment.rows].addmm_(shrunk, site.b[columns], alpha=alpha)
        if not isinstance(segment.rows, slice):
            y[segment.rows] = part
    if site.vectors:
        add_vectors(y, site, route)
