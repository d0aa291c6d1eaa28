"""Versions that a training run pushes: new requests get them before they are durable.

A version is loaded into the slots of workers that have the version before it. Then the name points to it, and then it
is stored and written to the host cache. Several workers read it from the cache, which then comes first. A cache or a
worker that fails costs time and not the push: requests then wait for the load, as for any cold adapter.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from control_plane.adapters.kept_files import source_version
from control_plane.adapters.life_cycle import AdapterLifeCycle, Registration
from control_plane.caller import current_caller
from control_plane.errors import MotetError
from control_plane.fleet.fleet import Fleet
from control_plane.host_cache.fresh_blobs import FreshBlob
from control_plane.host_cache.weights import AdapterWeights
from control_plane.registry.companions.inherited import NOT_INHERITED, Inherited
from control_plane.registry.model.base_model import BaseModel
from control_plane.registry.peft.ingest import PackedInfo
from control_plane.registry.records import Registered
from control_plane.registry.registry import Registry
from control_plane.scheduler.types import AdapterRef

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Pushed:
    """A version that was pushed, and how long the phases after its reception took, in seconds."""

    registered: Registered
    worker_ids: tuple[str, ...]  # those that had it in a slot when new requests got it
    files_from: str  # digest of the version whose files it has; empty: it has none
    pack_s: float
    cache_s: float  # 0: it came to the cache after it was visible
    load_s: float
    visible_s: float  # from the call until new requests got it
    durable_s: float  # from the call until its end


class Pushes:
    """Registers pushed versions. Used from one event loop."""

    def __init__(
        self,
        *,
        base_model: BaseModel,
        registry: Registry,
        life_cycle: AdapterLifeCycle,
        weights: AdapterWeights,
        fleet: Fleet,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._base_model = base_model
        self._registry = registry
        self._life_cycle = life_cycle
        self._weights = weights
        self._fleet = fleet
        self._clock = clock

    def check_registrable(self, registration: Registration) -> None:
        """Raise what pushing would raise whatever the weights."""
        self._life_cycle.check_registrable(registration)

    async def kept_files(self, adapter_id: str, named: str) -> Inherited:
        """What a version of the name has beside its weights: see kept_files.py. Raises MotetError."""
        version = source_version(self._registry.find(adapter_id), adapter_id, named, self._base_model)
        if version is None:
            return NOT_INHERITED
        documents = await self._weights.documents(version.digest)
        vocab_size = version.vocab_size or self._base_model.vocab_size
        return Inherited(version.digest, documents, vocab_size, version.signature)

    async def push(
        self, registration: Registration, files: Mapping[str, Path], inherited: Inherited = NOT_INHERITED
    ) -> Pushed:
        """Make the files the active version of the name, unless it is held. The caller writes the audit log.

        `inherited`: what `kept_files` returned.
        """
        before = self._registry.find(registration.adapter_id)
        previous_digest = "" if before is None else before.active_digest
        tenant = current_caller().tenant
        moments, worker_ids = [self._clock()], list[str]()
        digest = ""

        @contextlib.asynccontextmanager
        async def publish(packed: PackedInfo) -> AsyncIterator[None]:
            nonlocal digest
            digest = packed.digest
            moments.append(self._clock())
            blob = FreshBlob(packed.digest, packed.manifest, [chunk.path for chunk in packed.chunks])
            workers = self._fleet.preloads.choose_workers(previous_digest)
            with self._weights.fresh(blob):
                if len(workers) > 1:  # one reads the files, or is sent what lies in them
                    await self._weights.cache_fresh(blob)
                moments.append(self._clock())
                self._fleet.cancel_unload(packed.digest)
                ref = AdapterRef(packed.digest, packed.arena_bytes)
                worker_ids.extend(await self._fleet.preloads.preload(ref, tenant, workers))
                moments.append(self._clock())
                async with self._caching(blob):
                    yield

        try:
            is_shown = not registration.rollout.is_held
            registered = await self._life_cycle.register(
                registration, files, publish=publish if is_shown else None, inherited=inherited
            )
        except MotetError:
            if digest and not self._registry.is_named(digest):
                await self._weights.drop(digest)
            raise
        if not digest:  # no request gets it: it was only checked, or is held
            moments += [self._clock()] * 3
        begun_s, packed_s, cached_s, visible_s = moments
        logger.info(
            "version pushed adapter_id=%s digest=%s workers=%s", registration.adapter_id, registered.digest, worker_ids
        )
        return Pushed(
            registered,
            tuple(worker_ids),
            inherited.digest,
            pack_s=packed_s - begun_s,
            cache_s=cached_s - packed_s,
            load_s=visible_s - cached_s,
            visible_s=visible_s - begun_s,
            durable_s=self._clock() - begun_s,
        )

    @contextlib.asynccontextmanager
    async def _caching(self, blob: FreshBlob) -> AsyncIterator[None]:
        """Bring the blob into the cache while the block runs."""
        caching = asyncio.ensure_future(self._weights.cache_fresh(blob))
        try:
            yield
            await asyncio.wait([caching])
        finally:
            if not caching.done():
                caching.cancel()
                await asyncio.wait([caching])
            if not caching.cancelled() and (error := caching.exception()) is not None:
                logger.warning("pushed version not cached digest=%s error=%s", blob.digest, error)
