"""Brings packed adapters into the store as blobs, repairs damaged ones, and removes those that no name uses."""

from __future__ import annotations

import logging

from control_plane.errors import MotetError, StoreUnavailable
from control_plane.registry.catalog import Catalog
from control_plane.registry.peft.ingest import PackedChunk, PackedInfo
from control_plane.registry.store.artifact_store import ArtifactStore
from control_plane.store_calls import StoreCalls

logger = logging.getLogger(__name__)


class BlobWriter:
    """Writes blobs; keeps the catalog's set of complete ones. The caller holds the blob's lock."""

    def __init__(self, store: ArtifactStore, calls: StoreCalls, catalog: Catalog) -> None:
        self._store = store
        self._calls = calls
        self._catalog = catalog

    async def put(self, packed: PackedInfo) -> bool:
        """Write the blob unless the store has it whole, which a full read shows. Returns whether one was repaired.

        A half-written blob goes again; a damaged one that could not be repaired stays as it is.
        """
        digest = packed.digest
        await self._calls.change(self._store.claim_blob, digest)
        if digest in self._catalog.blobs:
            return await self._repair(packed)
        try:
            for index, chunk in enumerate(packed.chunks):
                await self._put_chunk(digest, index, chunk)
            await self._calls.change(self._store.put_manifest, digest, packed.manifest)
        except BaseException:
            await self._delete(digest)
            raise
        self._catalog.blobs.add(digest)
        return False

    async def confirm(self, digest: str) -> None:
        """Call this just before the record that names the blob is written. Raises StoreUnavailable if it is gone."""
        if not await self._calls.change(self._store.renew_claim, digest):
            self._catalog.blobs.discard(digest)
            raise StoreUnavailable("another server deleted these weights meanwhile; register them again")

    async def delete_unnamed(self, digest: str) -> None:
        """Remove the blob unless a name uses it. One that cannot be removed is left for the next start."""
        if not self._catalog.is_named(digest):
            await self._delete(digest)

    async def _repair(self, packed: PackedInfo) -> bool:
        repaired = []
        for index, chunk in enumerate(packed.chunks):
            check = (packed.digest, index, chunk.size_bytes, chunk.sha256)
            if not await self._calls.change(self._store.is_whole_chunk, *check, size_bytes=chunk.size_bytes):
                await self._put_chunk(packed.digest, index, chunk)
                repaired.append(index)
        try:
            has_manifest = await self._calls.change(self._store.read_manifest, packed.digest) == packed.manifest
        except FileNotFoundError:
            has_manifest = False
        if not has_manifest:
            await self._calls.change(self._store.put_manifest, packed.digest, packed.manifest)
        if not repaired and has_manifest:
            return False
        logger.warning("blob repaired digest=%s chunks=%s had_manifest=%s", packed.digest, repaired, has_manifest)
        return True

    async def _put_chunk(self, digest: str, index: int, chunk: PackedChunk) -> None:
        await self._calls.change(self._store.put_chunk, digest, index, chunk.path, size_bytes=chunk.size_bytes)

    async def _delete(self, digest: str) -> None:
        self._catalog.blobs.discard(digest)
        try:
            await self._calls.change(self._store.delete_blob, digest)
        except MotetError as error:
            logger.warning("blob left for the next start digest=%s error=%s", digest, error)
