"""Adapters that are loaded before a request needs them."""

from __future__ import annotations

from control_plane.scheduler.memory.adapter_demands import AdapterDemands
from control_plane.scheduler.memory.adapter_purge import AdapterPurge
from control_plane.scheduler.types import AdapterRef


class Preloads:
    """The preloads of one worker. Nothing keeps a preloaded adapter in its slot afterwards."""

    def __init__(self, demands: AdapterDemands, purge: AdapterPurge, arena_bytes: int) -> None:
        self._demands = demands
        self._purge = purge
        self._arena_bytes = arena_bytes

    def begin(self, ref: AdapterRef, account: str) -> None:
        """Load the adapter if there is room, in turns with other loads of the account.

        An adapter that exceeds the arena, or is being unloaded, is left out.
        """
        if ref.arena_bytes <= self._arena_bytes and not self._purge.is_purged(ref.digest):
            self._demands.preload(ref, account)

    def end(self, digest: str) -> None:
        """Demand the adapter no more unless requests do. A load that was sent goes on."""
        self._demands.end_preload(digest)

    def is_open(self, digest: str) -> bool:
        """Whether the preload of an adapter has not ended: it was neither loaded nor did it fail for good."""
        return self._demands.is_preloading(digest)
