"""Brings versions into the host cache and into arenas ahead of requests, and takes them out. Writes the audit log.

What a caller learns of the places follows its role, as `AdapterLifeCycle.placements` does: workers and what others use
are for admins.
"""

from __future__ import annotations

import asyncio
import contextlib
import enum
from collections.abc import Sequence

from control_plane.audit import actions
from control_plane.audit.audit_log import AuditLog
from control_plane.caller import current_caller
from control_plane.errors import MotetError, PermissionDenied
from control_plane.fleet.adapters.residency import Outcome, PlaceResult
from control_plane.fleet.fleet import Fleet
from control_plane.host_cache.weights import AdapterWeights
from control_plane.registry.records import ResolvedAdapter
from control_plane.registry.registry import Registry
from control_plane.registry.versions.version_names import VersionName

# Of the results of all workers, what a caller without the role "admin" gets: the first of these that there is.
_ORDER = (Outcome.LOADED, Outcome.LOADING, Outcome.NO_ROOM, Outcome.FAILED)


class MemoryTier(enum.Enum):
    """A tier that versions are brought into and taken out of."""

    HOST_CACHE = "host cache"
    ARENA = "arena"


class AdapterResidency:
    """Loads and unloads on request. Used from one event loop."""

    def __init__(
        self, registry: Registry, weights: AdapterWeights, fleet: Fleet, audit: AuditLog | None = None
    ) -> None:
        """`audit`: None for lines of the process log alone."""
        self._registry = registry
        self._weights = weights
        self._fleet = fleet
        self._audit = audit or AuditLog()

    async def load(
        self, name: VersionName, digest: str, tier: MemoryTier, worker_ids: Sequence[str], wait_s: float
    ) -> tuple[str, list[PlaceResult]]:
        """Bring a version there; its digest, and what became of each place. Raises what the registry raises."""
        caller = current_caller()
        async with self._audit.change(actions.LOAD, f"adapters/{name.adapter_id}") as change:
            resolved = self._own(name, digest)
            change.digest = resolved.ref.digest
            if worker_ids and not caller.principal.is_admin:
                raise PermissionDenied("worker_ids: only an admin may name workers; leave it empty")
            if tier is MemoryTier.HOST_CACHE:
                return change.digest, self._shown([await self._cache(resolved, wait_s)])
            account = self._fleet.account_of(
                caller.tenant, caller.host, is_authenticated=caller.principal.is_authenticated
            )
            residency = self._fleet.residency
            workers = worker_ids or residency.worker_ids
            return change.digest, self._shown(await residency.load(resolved.ref, account, workers, wait_s))

    async def unload(
        self, name: VersionName, digest: str, tier: MemoryTier, worker_ids: Sequence[str], wait_s: float
    ) -> tuple[str, list[PlaceResult]]:
        """Take a version out; its digest, and what became of each place. Raises what the registry raises."""
        async with self._audit.change(actions.UNLOAD, f"adapters/{name.adapter_id}") as change:
            change.digest = self._own(name, digest).ref.digest
            if tier is MemoryTier.HOST_CACHE:
                return change.digest, [await self._drop(change.digest)]
            residency = self._fleet.residency
            workers = worker_ids or residency.worker_ids
            return change.digest, await residency.unload(change.digest, workers, wait_s)

    def _own(self, name: VersionName, digest: str) -> ResolvedAdapter:
        """The version, of an adapter that the caller may change. Without a name of it, the active one."""
        record = self._registry.changeable(name.adapter_id)
        if not name.selector:
            digest = digest or record.active_digest
        return self._registry.resolve(name.adapter_id, digest, selector=name.selector)

    async def _cache(self, resolved: ResolvedAdapter, wait_s: float) -> PlaceResult:
        digest = resolved.ref.digest
        if self._weights.is_cached(digest):
            self._weights.touch(digest)
            return PlaceResult(Outcome.WAS_LOADED)
        try:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(wait_s):
                    await self._weights.ensure_cached(digest)
                    if self._weights.is_cached(digest):
                        return PlaceResult(Outcome.LOADED)
                    stats = self._weights.stats()
                    if not stats.is_available:
                        return PlaceResult(Outcome.FAILED, reason="the host cache does not respond")
                    return PlaceResult(Outcome.NO_ROOM, reason="what is pinned leaves the host cache too little room")
        except MotetError as error:
            return PlaceResult(Outcome.FAILED, reason=str(error))
        return PlaceResult(Outcome.LOADING)

    async def _drop(self, digest: str) -> PlaceResult:
        if self._weights.is_pinned(digest):
            return PlaceResult(Outcome.PINNED)
        if not self._weights.is_cached(digest):
            return PlaceResult(Outcome.WAS_ABSENT)
        await self._weights.drop(digest)
        return PlaceResult(Outcome.UNLOADED)

    def _shown(self, results: list[PlaceResult]) -> list[PlaceResult]:
        """What the caller may learn: whether the version is there, without workers and without what others use."""
        if current_caller().principal.is_admin:
            return results
        outcomes = {Outcome.LOADED if r.outcome is Outcome.WAS_LOADED else r.outcome for r in results}
        return [PlaceResult(next(outcome for outcome in _ORDER if outcome in outcomes))] if outcomes else []
