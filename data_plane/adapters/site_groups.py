"""Sites that one shrink and one expand serve together: views of the slot table, made once for each fused linear."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from data_plane.adapters.sites import Site
from data_plane.adapters.slots import SlotTable
from kernels.lora import SiteGroup


class SiteGroups:
    """The groups of one arena. Their tensors are views that the slot table keeps up to date."""

    def __init__(self, sites: Sequence[Site], table: SlotTable, pages: torch.Tensor) -> None:
        self._sites = {site.name: (index, site) for index, site in enumerate(sites)}
        self._table = table
        self._pages = pages
        self._groups: dict[tuple[str, ...], list[tuple[tuple[str, ...], SiteGroup]]] = {}

    def of(self, names: tuple[str, ...]) -> list[tuple[tuple[str, ...], SiteGroup]]:
        """The sites in this order as groups, each with its names: one group if the model lists them in this order.

        q, k and v are listed so by most models, and so are gate and up. Sites that are not become several groups.
        """
        if names not in self._groups:
            runs: list[list[str]] = []
            for name in names:
                is_next = bool(runs) and self._sites[name][0] == self._sites[runs[-1][-1]][0] + 1
                runs[-1:] = [[*runs[-1], name]] if is_next else [*runs[-1:], [name]]
            self._groups[names] = [(tuple(run), self._group(run)) for run in runs]
        return self._groups[names]

    def _group(self, names: list[str]) -> SiteGroup:
        sites = [self._sites[name][1] for name in names]
        return self._table.group(sites, self._pages)
