"""The adapters of one step, applied linear by linear or to linears that were fused."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from data_plane.adapters.site_groups import NamedGroup, SiteGroups
from data_plane.adapters.slots import ResidentAdapter, SiteWeights
from data_plane.adapters.working_set import WorkingSet
from kernels.lora import (
    DeviceRoute,
    Epilogue,
    Route,
    add_lora_embedding,
    add_lora_group,
    add_lora_sites,
    lora_embed,
    lora_expand,
)
from kernels.lora.native import LoraTokens, lora_tokens


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

    def embed(self, site_name: str, token_ids: torch.Tensor, y: torch.Tensor, multiplier: float) -> None:
        """`apply` for an embedding, whose x are the columns of A at token_ids [num_tokens].

        What is added is multiplied, as the model multiplies what it looks up.
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
        self.apply_group((site_name,), x, y)

    def apply_group(self, site_names: tuple[str, ...], x: torch.Tensor, y: torch.Tensor) -> None:
        sites = [self._working_set.site(name) if self.targets(name) else None for name in site_names]
        widths = [self._working_set.out_features(name) for name in site_names]
        add_lora_sites(y, x, list(zip(widths, sites, strict=True)), self._route)

    def embed(self, site_name: str, token_ids: torch.Tensor, y: torch.Tensor, multiplier: float) -> None:
        site = self._working_set.site(site_name) if self.targets(site_name) else None
        if site is not None:
            add_lora_embedding(y, token_ids, site, self._route, multiplier=multiplier)


@dataclass(frozen=True, slots=True)
class SiteNeeds:
    """What the adapters of a step that target a site have there."""

    max_rank: int
    has_vectors: bool  # one of them has a gain or a LoRA bias

    @classmethod
    def by_site(cls, adapters: Iterable[ResidentAdapter], names: Iterable[str] | None = None) -> dict[str, SiteNeeds]:
        """Of every site, or of the named ones, that one of the adapters targets."""
        entries: dict[str, list[SiteWeights]] = {}
        for adapter in adapters:
            for name in adapter.weights if names is None else names:
                if name in adapter.weights:
                    entries.setdefault(name, []).append(adapter.weights[name])
        return {
            name: cls(max(entry.rank for entry in here), any(entry.has_vector for entry in here))
            for name, here in entries.items()
        }


class ShrunkRows:
    """Memory for x @ A that grows to what a step needed most and stays."""

    def __init__(self) -> None:
        self._values = torch.zeros(0)

    def rows(self, num_values: int) -> torch.Tensor:
        """float32 [num_values], the same memory in every step."""
        if len(self._values) < num_values:
            self._values = torch.zeros(num_values)
        return self._values[:num_values]


class PagedStep:
    """A step that multiplies with the arena's pages where they lie. `needs` names the sites that it targets."""

    def __init__(
        self, groups: SiteGroups, needs: Mapping[str, SiteNeeds], route: DeviceRoute, shrunk: ShrunkRows
    ) -> None:
        self._groups = groups
        self._needs = needs
        self._route = route
        self._shrunk = shrunk

    def targets(self, site_name: str) -> bool:
        return site_name in self._needs

    def apply(self, site_name: str, x: torch.Tensor, y: torch.Tensor) -> None:
        self.apply_group((site_name,), x, y)

    def apply_group(self, site_names: tuple[str, ...], x: torch.Tensor, y: torch.Tensor) -> None:
        groups = self._groups.of(site_names)
        parts = torch.split(y, [sum(group.sites.out_features) for group in groups], dim=1)
        for group, part in zip(groups, parts, strict=True):
            max_rank, epilogue = self._needs_of(group)
            if max_rank:
                add_lora_group(part, x, group.sites, self._route, max_rank=max_rank, epilogue=epilogue)

    def embed(self, site_name: str, token_ids: torch.Tensor, y: torch.Tensor, multiplier: float) -> None:
        (group,) = self._groups.of((site_name,))
        max_rank, epilogue = self._needs_of(group)
        if max_rank:
            h = lora_embed(token_ids, group.sites.site(0), self._route, max_rank=max_rank)
            if multiplier != 1.0:
                h.mul_(multiplier)
            lora_expand(h, group.sites, y, self._route, epilogue=epilogue)

    def native_tokens(self, num_sites: int) -> LoraTokens:
        max_rank = max((needs.max_rank for needs in self._needs.values()), default=0)
        h = self._shrunk.rows(num_sites * self._route.num_tokens * max_rank)
        return lora_tokens(self._route, h.view(num_sites, self._route.num_tokens, max_rank))

    def _needs_of(self, group: NamedGroup) -> tuple[int, Epilogue | None]:
        """The greatest rank of the group in this step, 0 if no adapter targets it, and what its expand needs."""
        needs = [self._needs[name] for name in group.names if name in self._needs]
        if not needs:
            return 0, None
        epilogue = group.epilogue if any(need.has_vectors for need in needs) else None
        return max(need.max_rank for need in needs), epilogue
