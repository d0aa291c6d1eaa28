"""The adapters of one step, applied linear by linear."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from data_plane.adapters.slots import ResidentAdapter
from data_plane.adapters.working_set import WorkingSet
from kernels.lora import Route, add_lora


class LoraStep:
    """Valid until the arena's next `begin_step`."""

    def __init__(self, adapters: Sequence[ResidentAdapter], working_set: WorkingSet, route: Route) -> None:
        self._adapters = adapters
        self._working_set = working_set
        self._route = route

    def targets(self, site_name: str) -> bool:
        """Whether an adapter of the step targets the site."""
        return any(site_name in adapter.weights for adapter in self._adapters)

    def apply(self, site_name: str, x: torch.Tensor, y: torch.Tensor) -> None:
        """y [num_tokens, out] += scaling * (x [num_tokens, in] @ A.T) @ B, in place, by each token's slot.

        A no-op for a site that no adapter of the step targets.
        """
        site = self._working_set.site(site_name)
        if site is not None and self.targets(site_name):
            add_lora(y, x, site, self._route)
