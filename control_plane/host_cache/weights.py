"""Packed adapters from the host cache or the artifact store, every byte verified; keeps the cache filled.

One fill per digest at a time, four store reads at once. The cache is never trusted and never needed: what it lacks or
garbles is read from the store.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import AsyncIterator
from functools import partial
from typing import Protocol

from control_plane.errors import AdapterNotFound, FieldViolation, InvalidRequest, MotetError, StoreUnavailable
from control_plane.host_cache.base import HostCache, HostCacheStats
from control_plane.host_cache.packed import Layout, PackedAdapter, read_layout

logger = logging.getLogger(__name__)

MAX_STORE_READS = 4
_DIGEST = re.compile(r"^[0-9a-f]{64}\Z")


class BlobStore(Protocol):
    """Where adapters lie for good (registry.store.ArtifactStore). Blocks; missing ones raise FileNotFoundError."""

    def read_manifest(self, digest: str) -> bytes:
        """The canonical manifest."""

    def read_chunk(self, digest: str, index: int) -> bytes:
        """One chunk."""


class AdapterWeights:
    """The one way to an adapter's bytes in the control plane."""

    def __init__(self, cache: HostCache, store: BlobStore) -> None:
        self._cache = cache
        self._store = store
        self._reads = asyncio.Semaphore(MAX_STORE_READS)
        self._fills: dict[str, asyncio.Task[Layout]] = {}
        self._pinned: set[str] = set()
        self._num_hits = 0
        self._num_misses = 0
        self._num_corrupt = 0
        cache.on_emptied = self._refill_pinned

    @property
    def worker_url(self) -> str:
        """Where workers read by themselves; "": they cannot."""
        return self._cache.worker_url

    async def open_packed(self, digest: str) -> PackedAdapter:
        """The adapter, from the cache if it is whole there, else from the store. Raises MotetError."""
        _check_digest(digest)
        layout = await self._cached_layout(digest)
        if layout is None:
            self._num_misses += 1
            layout = await self._fill(digest)
        else:
            self._num_hits += 1
        return PackedAdapter(layout.manifest, partial(self._chunks, layout))

    async def ensure_cached(self, digest: str) -> None:
        """Have it in the cache, if the cache works and it fits."""
        _check_digest(digest)
        if self._cache.contains(digest):
            self._cache.touch(digest)
        elif self._cache.is_available:
            await self._fill(digest)

    async def drop(self, digest: str) -> None:
        """Forget it in the cache: it is being deleted. A pinned one stays: another name holds that pin."""
        fill = self._fills.get(digest)
        if fill is not None:
            await asyncio.wait([fill])
        if digest not in self._pinned:
            await self._cache.drop(digest)

    def touch(self, digest: str) -> None:
        """It was used just now."""
        self._cache.touch(digest)

    async def pin(self, digest: str) -> None:
        """Never evict it from the cache. Raises PinBudgetExceeded."""
        _check_digest(digest)
        layout = await self._stored_layout(digest)
        self._cache.pin(digest, layout.size_bytes)
        self._pinned.add(digest)
        await self.ensure_cached(digest)

    async def unpin(self, digest: str) -> None:
        """Let it be evicted again; not pinned is fine."""
        self._pinned.discard(digest)
        self._cache.unpin(digest)

    def is_cached(self, digest: str) -> bool:
        """Whether the cache is thought to hold it."""
        return self._cache.contains(digest)

    def stats(self) -> HostCacheStats:
        """Counts and sizes."""
        return HostCacheStats(
            num_adapters=self._cache.num_adapters,
            used_bytes=self._cache.used_bytes,
            budget_bytes=self._cache.budget_bytes,
            is_available=self._cache.is_available,
            num_hits=self._num_hits,
            num_misses=self._num_misses,
            num_corrupt=self._num_corrupt,
        )

    # ---- reading ----

    async def _chunks(self, layout: Layout) -> AsyncIterator[bytes]:
        """Verified chunks. One that the cache lacks or garbles comes from the store, and the cache is filled again."""
        is_lost = False
        for index in range(len(layout.sizes)):
            chunk = None
            if not is_lost and self._cache.contains(layout.digest):
                chunk = await self._cache.read_chunk(layout.digest, index)
                if chunk is not None and not layout.is_chunk(index, chunk):
                    self._count_corrupt(layout.digest)
                    chunk = None
                is_lost = chunk is None
            if chunk is None:
                chunk = await self._stored_chunk(layout, index)
            yield chunk
        if is_lost:
            await self._cache.drop(layout.digest)
            if self._cache.is_available:
                self._start_fill(layout.digest)

    async def _cached_layout(self, digest: str) -> Layout | None:
        if not self._cache.contains(digest):
            return None
        manifest = await self._cache.read_manifest(digest)
        layout = read_layout(digest, manifest) if manifest is not None else None
        if layout is None:
            if manifest is not None:
                self._count_corrupt(digest)
            await self._cache.drop(digest)
        return layout

    def _count_corrupt(self, digest: str) -> None:
        self._num_corrupt += 1
        logger.error("host cache gave wrong bytes digest=%s", digest)

    async def _stored_layout(self, digest: str) -> Layout:
        manifest = await self._from_store(digest, self._store.read_manifest, digest)
        layout = read_layout(digest, manifest)
        if layout is None:
            raise _damaged(digest)
        return layout

    async def _stored_chunk(self, layout: Layout, index: int) -> bytes:
        chunk = await self._from_store(layout.digest, self._store.read_chunk, layout.digest, index)
        if not layout.is_chunk(index, chunk):
            raise _damaged(layout.digest)
        return chunk

    async def _from_store(self, digest: str, read: object, *arguments: object) -> bytes:
        assert callable(read)
        async with self._reads:
            try:
                result = await asyncio.to_thread(read, *arguments)
            except FileNotFoundError as error:
                raise AdapterNotFound(
                    f"no weights of digest {digest}; register the adapter again", resource=f"digests/{digest}"
                ) from error
        assert isinstance(result, bytes)
        return result

    # ---- filling ----

    async def _fill(self, digest: str) -> Layout:
        """Read the manifest from the store and write the adapter to the cache if it fits; together with whoever asks
        for the same digest meanwhile, and to the end even if this caller is cancelled."""
        return await asyncio.shield(self._start_fill(digest))

    def _start_fill(self, digest: str) -> asyncio.Task[Layout]:
        task = self._fills.get(digest)
        if task is None:
            task = asyncio.get_running_loop().create_task(self._fill_once(digest))
            self._fills[digest] = task
            task.add_done_callback(partial(self._fill_ended, digest))
        return task

    def _fill_ended(self, digest: str, task: asyncio.Task[Layout]) -> None:
        self._fills.pop(digest, None)
        if not task.cancelled() and (error := task.exception()):
            logger.warning("host cache not filled digest=%s error=%s", digest, error)

    async def _fill_once(self, digest: str) -> Layout:
        layout = await self._stored_layout(digest)
        if not self._cache.contains(digest):
            await self._cache.write(digest, layout.manifest, layout.sizes, self._stored_chunks(layout))
        return layout

    async def _stored_chunks(self, layout: Layout) -> AsyncIterator[bytes]:
        for index in range(len(layout.sizes)):
            yield await self._stored_chunk(layout, index)

    def _refill_pinned(self) -> None:
        for digest in sorted(self._pinned):
            if not self._cache.contains(digest):
                self._start_fill(digest)


def _check_digest(digest: str) -> None:
    if not _DIGEST.match(digest):
        raise InvalidRequest(FieldViolation("digest", "is no digest: 64 lower-case hexadecimal digits are expected"))


def _damaged(digest: str) -> MotetError:
    logger.error("artifact store holds wrong bytes digest=%s", digest)
    return StoreUnavailable(f"the stored weights of digest {digest} are damaged; register the adapter again")
