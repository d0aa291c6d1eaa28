"""Stacked copies of the adapters that recent steps used: what the dense products on the CPU multiply with.

Adapters are appended when a step first needs them, and the set is built anew from the pages when too much of it is
idle. Entries are keyed by (slot, generation): a slot that was filled again never meets its old rows. Used by the
compute thread only. Memory: at most a quarter more than the arena, the slack of growing included.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from data_plane.adapters.base_weights import BaseWeights
from data_plane.adapters.pages import PagePool
from data_plane.adapters.sites import Site
from data_plane.adapters.slots import ResidentAdapter, SiteWeights
from kernels.lora import Columns, SlotVectors, StackedSite, stack_columns

# A stack that must grow gets this much room, so that adding adapters one by one copies each only a few times.
GROWTH = 1.25
# A set of which more than half is idle is rebuilt after so many steps in a row: requests that come and go in
# alternation should not make it be built again and again.
PATIENCE_STEPS = 16

NOBODY = -2  # slot of rows whose adapter left its slot


@dataclass(slots=True)
class _Stack:
    """One site's rows; the first num_rows are in use."""

    a: torch.Tensor
    b: torch.Tensor
    num_rows: int
    members: list[tuple[ResidentAdapter, int, float]]  # in the order of the rows, with rank and scaling
    vectors: list[tuple[ResidentAdapter, SlotVectors]]  # of those that have any


class WorkingSet:
    """The stacks of one arena."""

    def __init__(self, sites: Sequence[Site], pool: PagePool, base: BaseWeights, max_bytes: int) -> None:
        self._sites = {site.name: site for site in sites}
        self._pool = pool
        self._base = base
        self._max_bytes = max_bytes
        self._members: dict[tuple[int, int], ResidentAdapter] = {}
        self._stacks: dict[str, _Stack] = {}
        self._stacked: dict[str, StackedSite] = {}
        self._num_wasteful_steps = 0
        self.num_rebuilds = 0
        self.size_bytes = 0  # of the rows in use

    def site(self, name: str) -> StackedSite | None:
        """A site's stack, or None if no member targets it."""
        return self._stacked.get(name)

    def out_features(self, name: str) -> int:
        """A site's width, whether a member targets it or not."""
        return self._sites[name].out_features

    def ensure(self, needed: Sequence[ResidentAdapter]) -> None:
        """Hold all of these adapters, and perhaps idle ones of earlier steps."""
        missing = [adapter for adapter in needed if (adapter.slot, adapter.generation) not in self._members]
        needed_bytes = sum(adapter.size_bytes for adapter in needed)
        total_bytes = self.size_bytes + sum(adapter.size_bytes for adapter in missing)
        is_wasteful = total_bytes > 2 * needed_bytes
        self._num_wasteful_steps = self._num_wasteful_steps + 1 if is_wasteful else 0
        if total_bytes > self._max_bytes or self._num_wasteful_steps >= PATIENCE_STEPS:
            self.clear()
            self.num_rebuilds += 1
            missing = list(needed)
        if missing:
            self._append(missing)

    def clear(self) -> None:
        """Drop everything."""
        self._members.clear()
        self._stacks.clear()
        self._stacked.clear()
        self._num_wasteful_steps = 0
        self.size_bytes = 0

    def _append(self, adapters: Iterable[ResidentAdapter]) -> None:
        by_site: dict[str, list[ResidentAdapter]] = {}
        for adapter in adapters:
            self._members[adapter.slot, adapter.generation] = adapter
            self.size_bytes += adapter.size_bytes
            for name in adapter.weights:
                by_site.setdefault(name, []).append(adapter)
        for name, added in by_site.items():
            self._grow(name, added)
        self._describe()

    def _grow(self, name: str, added: list[ResidentAdapter]) -> None:
        site = self._sites[name]
        num_new = sum(adapter.weights[name].rank for adapter in added)
        stack = self._stacks.get(name)
        if stack is None:
            stack = _Stack(self._rows(num_new, site.in_features), self._rows(num_new, site.out_features), 0, [], [])
            self._stacks[name] = stack
        elif stack.num_rows + num_new > stack.a.shape[0]:
            num_rows = int((stack.num_rows + num_new) * GROWTH)
            for side, width in (("a", site.in_features), ("b", site.out_features)):
                grown = self._rows(num_rows, width)
                grown[: stack.num_rows] = getattr(stack, side)[: stack.num_rows]
                setattr(stack, side, grown)
        for adapter in added:
            weights = adapter.weights[name]
            middle = weights.first + weights.num_a_pages
            end = middle + weights.num_b_pages
            ids = adapter.page_ids_device
            rows = slice(stack.num_rows, stack.num_rows + weights.rank)
            stack.a[rows] = self._pool.read(ids[weights.first : middle], weights.rank, site.in_features)
            stack.b[rows] = self._pool.read(ids[middle:end], weights.rank, site.out_features)
            stack.num_rows += weights.rank
            stack.members.append((adapter, weights.rank, weights.scaling))
            if weights.has_vector:
                stack.vectors.append((adapter, self._vectors(adapter, weights, site.out_features)))

    def _vectors(self, adapter: ResidentAdapter, weights: SiteWeights, width: int) -> SlotVectors:
        page_ids = adapter.page_ids_device[adapter.first_vector_page :]
        gain, lora_bias = (
            None if at is None else self._pool.read_values(page_ids, at, width)
            for at in (weights.gain_at, weights.lora_bias_at)
        )
        return SlotVectors(gain, lora_bias)

    def _rows(self, num_rows: int, width: int) -> torch.Tensor:
        return torch.empty(num_rows, width, dtype=self._pool.pages.dtype, device=self._pool.pages.device)

    def _describe(self) -> None:
        """Say what each row is, once per distinct list of ranks and scalings."""
        newest = dict(self._members.keys())  # generation by slot; the last to join wins
        shared: dict[tuple[tuple[int, int, float], ...], Columns] = {}
        for name, stack in self._stacks.items():
            members = tuple(
                (adapter.slot if newest[adapter.slot] == adapter.generation else NOBODY, rank, scaling)
                for adapter, rank, scaling in stack.members
            )
            if members not in shared:
                shared[members] = stack_columns(members, self._pool.pages.device)
            vectors = {
                adapter.slot: entry for adapter, entry in stack.vectors if newest[adapter.slot] == adapter.generation
            }
            base_bias = self._base.bias(name) if any(entry.gain is not None for entry in vectors.values()) else None
            self._stacked[name] = StackedSite(
                stack.a[: stack.num_rows],
                stack.b[: stack.num_rows],
                shared[members],
                vectors,
                None if base_bias is None else base_bias.float(),
            )
