"""The adapters of one step, applied linear by linear or to linears that were fused."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from data_plane.adapters.site_groups import SiteGroups
from data_plane.adapters.slots import ResidentAdapter, SiteWeights
from data_plane.adapters.working_set import WorkingSet
from kernels.lora import DeviceRoute, Route, add_lora_group, add_lora_sites


class LoraStep(Protocol):
    """Valid until the arena's next `begin_step`."""

    def targets(self, site_name: str) -> bool:
        """Whether an adapter of the step targets the site."""
        ...

    def apply(self, site_name: str, x: torch.Tensor, y: torch.Tensor) -> None:
        """y [num_tokens, out] += scaling * (x [num_tokens, in] @ A.T) @ B, in place, by each token's slot.

        With the LoRA bias or the DoRA gain of the slot's adapter, as kernels.lora.Epilogue says.
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


@dataclass(frozen=True, slots=True)
class SiteNeeds:
    """What the adapters of a step that target a site have there."""

    max_rank: int
    has_gain: bool
    has_lora_bias: bool

    @classmethod
    def by_site(cls, adapters: Iterable[ResidentAdapter]) -> dict[str, SiteNeeds]:
        """Of every site that one of the adapters targets."""
        entries: dict[str, list[SiteWeights]] = {}
        for adapter in adapters:
            for name, weights in adapter.weights.items():
                entries.setdefault(name, []).append(weights)
        return {
            name: cls(
                max(entry.rank for entry in here),
                any(entry.gain_at is not None for entry in here),
                any(entry.lora_bias_at is not None for entry in here),
            )
            for name, here in entries.items()
        }


class PagedStep:
    """A step that multiplies with the arena's pages where they lie. `needs` names the sites that it targets."""

    def __init__(self, groups: SiteGroups, needs: Mapping[str, SiteNeeds], route: DeviceRoute) -> None:
        self._groups = groups
        self._needs = needs
        self._route = route

    def targets(self, site_name: str) -> bool:
        return site_name in self._needs

    def apply(self, site_name: str, x: torch.Tensor, y: torch.Tensor) -> None:
        self.apply_group((site_name,), x, y)

    def apply_group(self, site_names: tuple[str, ...], x: torch.Tensor, y: torch.Tensor) -> None:
        groups = self._groups.of(site_names)
        parts = torch.split(y, [sum(group.sites.out_features) for group in groups], dim=1)
        for group, part in zip(groups, parts, strict=True):
            needs = [self._needs[name] for name in group.names if name in self._needs]
            if needs:
                epilogue = group.epilogue_for(
                    has_gain=any(need.has_gain for need in needs),
                    has_lora_bias=any(need.has_lora_bias for need in needs),
                )
                max_rank = max(need.max_rank for need in needs)
                add_lora_group(part, x, group.sites, self._route, max_rank=max_rank, epilogue=epilogue)
