"""The adapters of one step, applied linear by linear or to linears that were fused."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import torch

from data_plane.adapters.site_groups import SiteGroups
from data_plane.adapters.slots import ResidentAdapter
from data_plane.adapters.working_set import WorkingSet
from kernels.lora import DeviceRoute, Route, add_lora_group, add_lora_sites


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

    def apply_group(self, site_names: tuple[str, ...], x: torch.Tensor, y: torch.Tensor) -> None:
        """`apply` for sites that read the same x and write side by side in y [num_tokens, sum of out], in order."""
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
        self.apply_group((site_name,), x, y)

    def apply_group(self, site_names: tuple[str, ...], x: torch.Tensor, y: torch.Tensor) -> None:
        sites = [self._working_set.site(name) if self.targets(name) else None for name in site_names]
        widths = [self._working_set.out_features(name) for name in site_names]
        add_lora_sites(y, x, list(zip(widths, sites, strict=True)), self._route)


class PagedStep:
    """A step that multiplies with the arena's pages where they lie. `max_ranks` names the sites that it targets."""

    def __init__(self, groups: SiteGroups, max_ranks: Mapping[str, int], route: DeviceRoute) -> None:
        self._groups = groups
        self._max_ranks = max_ranks
        self._route = route

    def targets(self, site_name: str) -> bool:
        return site_name in self._max_ranks

    def apply(self, site_name: str, x: torch.Tensor, y: torch.Tensor) -> None:
        self.apply_group((site_name,), x, y)

    def apply_group(self, site_names: tuple[str, ...], x: torch.Tensor, y: torch.Tensor) -> None:
        groups = self._groups.of(site_names)
        parts = torch.split(y, [sum(group.out_features) for _, group in groups], dim=1)
        for (names, group), part in zip(groups, parts, strict=True):
            max_rank = max(self._max_ranks.get(name, 0) for name in names)
            if max_rank:
                add_lora_group(part, x, group, self._route, max_rank=max_rank)
