"""Sites that one shrink and one expand serve together: views of the slot table, made once for each fused linear."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from data_plane.adapters.arena.base_weights import BaseWeights
from data_plane.adapters.arena.slots import SlotTable
from data_plane.adapters.sites import Site
from kernels.lora import Epilogue, SiteGroup


@dataclass(frozen=True, slots=True)
class TableGroup:
    """Sites that lie side by side in the slot table."""

    rows: slice  # of the table
    sites: SiteGroup
    epilogue: Epilogue  # for steps in which an adapter has vectors here; one form, so that one kernel is compiled


class SiteGroups:
    """The groups of one arena. Their tensors are views that the slot table keeps up to date."""

    def __init__(self, sites: Sequence[Site], table: SlotTable, base: BaseWeights) -> None:
        self._sites = {site.name: (index, site) for index, site in enumerate(sites)}
        self._table = table
        self._base = base
        self._groups: dict[tuple[str, ...], list[TableGroup]] = {}

    def of(self, names: tuple[str, ...]) -> list[TableGroup]:
        """The sites in this order as groups: one group if the model lists them in this order.

        q, k and v are listed so by most models, and so are gate and up. Sites that are not become several groups.
        """
        if names not in self._groups:
            runs: list[list[str]] = []
            for name in names:
                is_next = bool(runs) and self._sites[name][0] == self._sites[runs[-1][-1]][0] + 1
                runs[-1:] = [[*runs[-1], name]] if is_next else [*runs[-1:], [name]]
            self._groups[names] = [self._group(tuple(run)) for run in runs]
        return self._groups[names]

    def _group(self, names: tuple[str, ...]) -> TableGroup:
        sites = [self._sites[name][1] for name in names]
        group, epilogue = self._table.group(sites)
        biases = [self._base.bias(name) for name in names]
        if any(bias is not None for bias in biases):
            device = group.pages.device
            parts = [
                torch.zeros(site.out_features, device=device) if bias is None else bias.float()
                for site, bias in zip(sites, biases, strict=True)
            ]
            epilogue = replace(epilogue, base_bias=torch.cat(parts))
        first = self._sites[names[0]][0]
        return TableGroup(slice(first, first + len(names)), group, epilogue)
