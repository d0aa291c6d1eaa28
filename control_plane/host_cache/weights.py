"""Packed adapters from the host cache or the artifact store, every byte verified; keeps the cache filled.

One fill per digest at a time, a few store reads at once, a few MiB of an adapter in memory. The cache is never trusted
and never needed: what it lacks or garbles is read from the store.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Collection
from contextlib import AbstractContextManager
from functools import partial
from typing import TypeVar

from contract.cache_keys import PART_BYTES, num_parts
from control_plane.checks import check_digest, require
from control_plane.errors import (
    AdapterDamaged,
    AdapterNotFound,
    StoreUnavailable,
)
from control_plane.host_cache.base import CacheAddress, HostCache, HostCacheStats
from control_plane.host_cache.fresh_blobs import BlobStore, FreshBlob, FreshBlobs
from control_plane.host_cache.packed import Layout, PackedAdapter, read_layout
from control_plane.store_calls import StoreCalls

logger = logging.getLogger(__name__)

MAX_STORE_READS = 8
# A chunk up to this size is read once, and held until its hash is known; of a larger one nothing is held, it is read
# twice. A decoder layer of an 8B model at rank 64 in bf16 takes 11 MB.
HELD_BYTES = 16 * PART_BYTES
_T = TypeVar("_T")
_ReadPart = Callable[[Layout, int, int], Awaitable[bytes | None]]


class AdapterWeights:
    """All reads of adapters' bytes in the control plane go through here."""

    def __init__(
        self, cache: HostCache, store: BlobStore, calls: StoreCalls, *, is_wanted: Callable[[str], bool]
    ) -> None:
        """`is_wanted`: whether a name has a version of that digest. Others are read, but never brought to the cache:
        they are being deleted."""
        self._cache = cache
        self._store = FreshBlobs(store)
        self._calls = calls
        self._is_wanted = is_wanted
        self._reads = asyncio.Semaphore(MAX_STORE_READS)
        self._fills: dict[str, asyncio.Task[Layout]] = {}
        self._drops: set[asyncio.Task[None]] = set()
        self._pinned: dict[str, set[str]] = {}  # digest -> holders, of which there is at least one
        self._damaged: set[str] = set()  # digests whose stored bytes were wrong when they were read last
        self._num_hits = 0
        self._num_misses = 0
        self._num_corrupt = 0
        self._cache_read_bytes = 0
        self._store_read_bytes = 0
        cache.on_available = self._reconcile

    @property
    def worker_address(self) -> CacheAddress:
        """Where workers read by themselves."""
        return self._cache.worker_address

    async def open_packed(self, digest: str) -> PackedAdapter:
        """The adapter, from the cache if it is whole there, else from the store. Raises MotetError."""
        require(check_digest, digest, "digest")
        layout = await self._cached_layout(digest)
        if layout is None:
            self._num_misses += 1
            layout = await self._fill(digest)
        else:
            self._num_hits += 1
        paths = tuple(self._store.paths(digest)[: len(layout.sizes)])  # documents beside the weights come last
        return PackedAdapter(layout.manifest, partial(self._parts, layout), paths)

    async def documents(self, digest: str) -> dict[str, bytes]:
        """What the version has beside its weights, by name, from the store. Raises MotetError."""

        def read() -> dict[str, bytes]:
            manifest = json.loads(self._store.read_manifest(digest))
            found = {}
            for index, entry in enumerate(manifest.get("companions", ()), start=len(manifest["chunks"])):
                data = self._store.read_range(digest, index, 0, entry["size_bytes"])
                if hashlib.sha256(data).hexdigest() != entry["sha256"]:
                    raise AdapterDamaged(
                        f"adapter {digest}: its stored {entry['name']} is damaged; register the adapter again"
                    )
                found[entry["name"]] = data
            return found

        try:
            return await self._calls.read(read)
        except FileNotFoundError as error:
            raise AdapterNotFound(
                f"the stored files of adapter {digest} are gone; register it again", resource=f"digests/{digest}"
            ) from error

    async def ensure_cached(self, digest: str) -> None:
        """Have it in the cache, if the cache works and it fits."""
        require(check_digest, digest, "digest")
        if self._cache.contains(digest):
            self._cache.touch(digest)
        elif self._cache.is_available:
            await self._fill(digest)

    def fresh(self, blob: FreshBlob) -> AbstractContextManager[None]:
        """Read a blob that the store does not have yet from its files until the block ends."""
        return self._store.serving(blob)

    async def cache_fresh(self, blob: FreshBlob) -> None:
        """Bring a blob into the cache inside the block of `fresh`, if the cache works and it fits.

        The files were written by this process: their hashes are not computed again.
        """
        layout = read_layout(blob.digest, blob.manifest)
        assert layout is not None, "a packed adapter has a manifest of ours"
        if self._cache.is_available and not self._cache.contains(blob.digest):
            async with contextlib.aclosing(self._unverified_parts(layout)) as parts:
                await self._cache.write(blob.digest, layout.manifest, layout.sizes, parts)

    async def drop(self, digest: str) -> None:
        """Remove an adapter that is being deleted from the cache. A pinned one stays: another name holds that pin."""
        fill = self._fills.get(digest)
        if fill is not None:
            await asyncio.wait([fill])
        self._damaged.discard(digest)
        if digest not in self._pinned:
            await self._cache.drop(digest)

    def touch(self, digest: str) -> None:
        """Record that the adapter was used just now."""
        self._cache.touch(digest)

    async def pin(self, digest: str, holder: str = "") -> None:
        """Never evict it from the cache while this holder keeps the pin. Raises PinBudgetExceeded."""
        require(check_digest, digest, "digest")
        layout = await self._stored_layout(digest)
        self._cache.pin(digest, layout.size_bytes, holder)
        self._pinned.setdefault(digest, set()).add(holder)
        await self.ensure_cached(digest)

    async def unpin(self, digest: str, holder: str = "") -> None:
        """Let it be evicted again, unless another holder has it pinned; not pinned is fine."""
        holders = self._pinned.get(digest, set())
        holders.discard(holder)
        if not holders:
            self._pinned.pop(digest, None)
        self._cache.unpin(digest, holder)

    @property
    def cached_digests(self) -> Collection[str]:
        """The versions that the cache is thought to hold."""
        return self._cache.digests

    def is_pinned(self, digest: str) -> bool:
        """Whether anybody has it pinned."""
        return digest in self._pinned

    def is_cached(self, digest: str) -> bool:
        """Whether the cache is thought to hold it."""
        return self._cache.contains(digest)

    def damage(self, digest: str) -> AdapterDamaged | None:
        """The error for an adapter whose stored bytes were found wrong, until they are read whole or stored again."""
        return _damaged_error(digest) if digest in self._damaged else None

    def stored_anew(self, digest: str) -> None:
        """The adapter was registered just now, and repaired where it was damaged."""
        self._damaged.discard(digest)

    async def wait_idle(self) -> None:
        """Wait for the fills and removals that run in the background."""
        while tasks := [*self._fills.values(), *self._drops]:
            await asyncio.wait(tasks)
            await asyncio.sleep(0)  # so that what ended is forgotten

    def stats(self) -> HostCacheStats:
        """Counts and sizes."""
        return HostCacheStats(
            num_adapters=len(self._cache.digests),
            used_bytes=self._cache.used_bytes,
            budget_bytes=self._cache.budget_bytes,
            is_available=self._cache.is_available,
            error=self._cache.error,
            num_hits=self._num_hits,
            num_misses=self._num_misses,
            num_corrupt=self._num_corrupt,
            num_evicted=self._cache.num_evicted,
            pinned_bytes=self._cache.pinned_bytes,
            cache_read_bytes=self._cache_read_bytes,
            store_read_bytes=self._store_read_bytes,
        )

    # ---- reading ----

    async def _parts(self, layout: Layout) -> AsyncIterator[bytes]:
        """Verified parts. A chunk that the cache lacks or garbles comes from the store; the cache is filled again."""
        is_lost = False
        for index in range(len(layout.sizes)):
            read: _ReadPart = self._cached_part
            held = None
            if not is_lost and self._cache.contains(layout.digest):
                held = await self._checked(layout, index, read)
                is_lost = held is None
            if held is None:
                read = self._stored_part
                held = await self._checked(layout, index, read)
            if held is None:
                raise self._note_damage(layout.digest)
            if held:
                for part in held:
                    yield part
            else:
                async for part in self._read_again(layout, index, read):
                    yield part
        if is_lost:
            await self._cache.drop(layout.digest)
            if self._cache.is_available:
                self._start_fill(layout.digest)

    async def _checked(self, layout: Layout, index: int, read: _ReadPart) -> list[bytes] | None:
        """The parts of a chunk whose hash is right, or no parts where it is too large to be held. None: it is wrong."""
        digest, held = hashlib.sha256(), []
        for part in range(num_parts(layout.sizes[index])):
            data = await read(layout, index, part)
            if data is None:
                return None
            await asyncio.to_thread(digest.update, data)
            if layout.sizes[index] <= HELD_BYTES:
                held.append(data)
        if digest.hexdigest() == layout.hashes[index]:
            return held
        if read == self._cached_part:
            self._count_corrupt(layout.digest)
        return None

    async def _read_again(self, layout: Layout, index: int, read: _ReadPart) -> AsyncIterator[bytes]:
        """The parts of a large chunk that was found right a moment ago."""
        digest = hashlib.sha256()
        for part in range(num_parts(layout.sizes[index])):
            data = await read(layout, index, part)
            if data is None:
                break
            await asyncio.to_thread(digest.update, data)
            yield data
        if digest.hexdigest() != layout.hashes[index]:
            raise StoreUnavailable(f"the weights of digest {layout.digest} changed while they were read; try again")

    async def _cached_part(self, layout: Layout, index: int, part: int) -> bytes | None:
        data = await self._cache.read_part(layout.digest, index, part)
        self._cache_read_bytes += len(data or b"")
        return data

    async def _stored_part(self, layout: Layout, index: int, part: int) -> bytes | None:
        """One part from the store; None if the chunk is missing or ends before."""
        start = part * PART_BYTES
        size_bytes = min(PART_BYTES, layout.sizes[index] - start)
        try:
            data = await self._from_store(self._store.read_range, layout.digest, index, start, size_bytes)
        except FileNotFoundError:
            await self._stored_layout(layout.digest)  # raises if the whole adapter is missing
            return None
        self._store_read_bytes += len(data)
        return data if len(data) == size_bytes else None

    async def _unverified_parts(self, layout: Layout) -> AsyncGenerator[bytes, None]:
        """The parts in order; each is read while the one before is written."""
        places = [(index, part) for index, size in enumerate(layout.sizes) for part in range(num_parts(size))]
        read = partial(self._stored_part, layout)
        ahead = asyncio.create_task(read(*places[0])) if places else None
        try:
            for place in [*places[1:], None]:
                assert ahead is not None, "an adapter without parts has no place"
                data = await ahead
                assert data is not None, "a packed chunk has the size that its manifest says"
                ahead = None if place is None else asyncio.create_task(read(*place))
                yield data
        finally:
            if ahead is not None and not ahead.done():
                ahead.cancel()
                await asyncio.wait([ahead])

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
        try:
            manifest = await self._from_store(self._store.read_manifest, digest)
        except FileNotFoundError as error:
            if self._is_wanted(digest):
                raise self._note_damage(digest) from error
            raise AdapterNotFound(
                f"no weights of digest {digest}; register the adapter again", resource=f"digests/{digest}"
            ) from error
        layout = read_layout(digest, manifest)
        if layout is None:
            raise self._note_damage(digest)
        return layout

    async def _from_store(self, read: Callable[..., _T], *arguments: object) -> _T:
        async with self._reads:
            return await self._calls.read(read, *arguments)

    def _note_damage(self, digest: str) -> AdapterDamaged:
        self._damaged.add(digest)
        logger.error("artifact store holds wrong bytes digest=%s", digest)
        return _damaged_error(digest)

    # ---- filling ----

    async def _fill(self, digest: str) -> Layout:
        """Read the manifest from the store and write the adapter to the cache if it fits; together with other callers
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
        if not self._cache.contains(digest) and self._is_wanted(digest):
            async with contextlib.aclosing(self._stored_parts(layout)) as parts:
                if await self._cache.write(digest, layout.manifest, layout.sizes, parts):
                    self._damaged.discard(digest)
            if not self._is_wanted(digest):  # its deletion began meanwhile
                await self._cache.drop(digest)
        return layout

    async def _stored_parts(self, layout: Layout) -> AsyncGenerator[bytes, None]:
        """Parts for the cache, which takes an adapter in only after the last one: wrong bytes raise before that."""
        for index, size in enumerate(layout.sizes):
            digest = hashlib.sha256()
            for part in range(num_parts(size)):
                data = await self._stored_part(layout, index, part)
                if data is None:
                    raise self._note_damage(layout.digest)
                await asyncio.to_thread(digest.update, data)
                if part == num_parts(size) - 1 and digest.hexdigest() != layout.hashes[index]:
                    raise self._note_damage(layout.digest)
                yield data

    def _reconcile(self) -> None:
        """After the cache became available: remove deleted adapters from it, bring back pinned ones."""
        for digest in self._cache.digests:
            if not self._is_wanted(digest):
                logger.info("forgetting a deleted adapter in the host cache digest=%s", digest)
                task = asyncio.get_running_loop().create_task(self._cache.drop(digest))
                self._drops.add(task)
                task.add_done_callback(self._drops.discard)
        for digest in sorted(self._pinned):
            if not self._cache.contains(digest):
                self._start_fill(digest)


def _damaged_error(digest: str) -> AdapterDamaged:
    return AdapterDamaged(
        f"the stored weights of adapter version {digest} are damaged; register the same adapter files again, which "
        "repairs them"
    )
