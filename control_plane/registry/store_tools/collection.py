"""Removes what no name uses, as every start of a server does, without a start."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from control_plane.registry.recovery import recover
from control_plane.registry.store.artifact_store import ArtifactStore
from control_plane.registry.store_tools.inspection import Strays, find_strays
from control_plane.store_calls import StoreCalls


@dataclass(frozen=True, slots=True)
class Collected:
    """What one collection did."""

    removed: Strays
    left: Strays  # may be in use by another server, or lie there while a record cannot be read


def collect(store: ArtifactStore) -> Collected:
    """Remove strays. The store is locked by the caller, so nothing that a server is registering is one."""
    before = find_strays(store)
    asyncio.run(_recover(store))
    after = find_strays(store)
    removed = Strays(
        tuple(digest for digest in before.blobs if digest not in after.blobs),
        tuple(name for name in before.versions if name not in after.versions),
        (),
    )
    return Collected(removed, after)


async def _recover(store: ArtifactStore) -> None:
    calls = StoreCalls()
    try:
        await recover(store, calls)
    finally:
        calls.close()
