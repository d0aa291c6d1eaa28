"""The adapters of one step, applied linear by linear."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import torch

from data_plane.adapters.slots import ResidentAdapter
from data_plane.adapters.working_set import WorkingSet
from kernels.lora import DeviceRoute, Route, SiteGroup, add_lora, add_lora_group


class LoraStep(Protocol):
    """Valid until the arena's next `begin_step`."""

    def targets(self, site_name: str) -> bool:
        """Whether an adapter of the step targets the site."""
        ...

    def apply(self, site_name: str, x: torch.Tensor, y: torch.Tensor) -> None:
        """y [num_tokens, out] += scaling * (x [num_tokens, in] @ A.T) @ B, in place, by each token's slot.

        A no-op for a site that no adapter of the step targets.
        """
        ...


class StackedStep:
    """A step that multiplies with stacked copies."""

    def __init__(self, adapters: Sequence[ResidentAdapter], working_set: WorkingSet, route: Route) -> None:
        self._adapters = adapters
        self._working_set = working_set
        self._route = route

    def targets(self, site_name: str) -> bool:
        return any(site_name in adapter.weights for adapter in self._adapters)

    def apply(self, site_name: str, x: torch.Tensor, y: torch.Tensor) -> None:
        site = self._working_set.site(site_name)
        if site is not None and self.targets(site_name):
            add_lora(y, x, site, self._route)


class PagedStep:
    """A step that multiplies with the arena's pages where they lie. `max_ranks` names the sites that it targets."""

    def __init__(self, sites: Mapping[str, SiteGroup], max_ranks: Mapping[str, int], route: DeviceRoute) -> None:
        self._sites = sites
        self._max_ranks = max_ranks
        self._route = route

    def targets(self, site_name: str) -> bool:
        return site_name in self._max_ranks

    def apply(self, site_name: str, x: torch.Tensor, y: torch.Tensor) -> None:
        if site_name in self._max_ranks:
            add_lora_group(y, x, self._sites[site_name], self._route, max_rank=self._max_ranks[site_name])
