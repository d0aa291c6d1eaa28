"""Names, versions and their states: the registry that API and fleet ask. Every change reaches the store first.

Reading is synchronous and touches memory only. Changes of one name happen one after the other; of two that carry the
same etag one wins. A caller's cancellation never leaves memory and store apart.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Coroutine, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from control_plane.errors import AdapterNotActive, Exhausted, MotetError, StoreUnavailable
from control_plane.registry.base_model import BaseModel
from control_plane.registry.catalog import Catalog, RegistryStats
from control_plane.registry.ingest import PackedInfo, ingest
from control_plane.registry.keyed_locks import KeyedLocks
from control_plane.registry.limits import check_adapter_id, check_digest, check_display_name, check_labels
from control_plane.registry.records import AdapterRecord, AdapterState, AdapterVersion, ResolvedAdapter, encode_record
from control_plane.registry.recovery import recover
from control_plane.registry.store import ArtifactStore

logger = logging.getLogger(__name__)

MAX_VERSIONS = 1000
_CONCURRENT_INGESTS = 2
_T = TypeVar("_T")


class Registry:
    """All adapters of one base model."""

    def __init__(
        self,
        store: ArtifactStore,
        base_model: BaseModel,
        *,
        max_adapter_bytes: int,
        clock: Callable[[], float],
        scratch_dir: Path | None,
    ) -> None:
        self.incarnation = 0  # durable, one more with every open
        self._store = store
        self._catalog = Catalog(base_model)
        self._max_adapter_bytes = max_adapter_bytes
        self._clock = clock  # wall clock, seconds
        self._scratch_dir = scratch_dir
        self._locks = KeyedLocks()  # a name's is taken before a blob's
        self._ingests = asyncio.Semaphore(_CONCURRENT_INGESTS)
        self._changes: set[asyncio.Task[Any]] = set()

    @classmethod
    async def open(
        cls,
        *,
        store: ArtifactStore,
        base_model: BaseModel,
        max_adapter_bytes: int,
        clock: Callable[[], float] = time.time,
        scratch_dir: Path | None = None,
    ) -> Registry:
        """Lock the store, bring it in order, read it. `scratch_dir` takes adapters while they are packed."""
        registry = cls(store, base_model, max_adapter_bytes=max_adapter_bytes, clock=clock, scratch_dir=scratch_dir)
        registry.incarnation = await asyncio.to_thread(store.acquire)
        recovered = await asyncio.to_thread(recover, store)
        registry._catalog = Catalog(base_model, recovered.blobs, recovered.records)
        num_adapters = registry.stats().num_registered
        logger.info("registry open incarnation=%d num_adapters=%d", registry.incarnation, num_adapters)
        return registry

    async def close(self) -> None:
        """Wait for changes under way, then give the store back."""
        if self._changes:
            await asyncio.wait(self._changes)
        self._store.close()

    # ---- reading ----

    def resolve(self, adapter_id: str, digest: str = "") -> ResolvedAdapter:
        """The version a new request gets: the active one, or the one asked for."""
        return self._catalog.resolve(adapter_id, digest)

    def get(self, adapter_id: str) -> AdapterRecord:
        """The record of a name. Raises AdapterNotFound, which suggests the nearest names."""
        return self._catalog.get(adapter_id)

    def list_page(self, page_size: int = 0, page_token: str = "") -> tuple[list[AdapterRecord], str]:
        """One page of records by name, and the token of the next page ("": none). 0 takes the default size."""
        return self._catalog.list_page(page_size, page_token)

    def versions_page(
        self, adapter_id: str, page_size: int = 0, page_token: str = ""
    ) -> tuple[list[AdapterVersion], str]:
        """One page of a name's versions, newest first, and the token of the next page ("": none)."""
        return self._catalog.versions_page(adapter_id, page_size, page_token)

    def is_shared(self, digest: str) -> bool:
        """Whether several names have a version of this digest, those that are being deleted included."""
        return self._catalog.num_names(digest) > 1

    def pinned_digests(self) -> list[str]:
        """Active digests of all pinned names, sorted."""
        return self._catalog.pinned_digests()

    def stats(self) -> RegistryStats:
        """Counts."""
        return self._catalog.stats()

    # ---- changes ----

    async def register(
        self,
        adapter_id: str,
        files: Mapping[str, Path],
        *,
        display_name: str = "",
        labels: Mapping[str, str] | None = None,
        validate_only: bool = False,
    ) -> AdapterRecord:
        """Check and pack the files and make them the active version of the name.

        The same bytes again change nothing, but that they are active again. Cancelled before the change begins,
        nothing is registered; cancelled later, the change is made to its end before this returns.
        """
        check_adapter_id(adapter_id)
        check_display_name(display_name)
        check_labels(labels or {})
        self._registrable(adapter_id)
        is_abandoned = threading.Event()
        change = asyncio.ensure_future(
            self._register(
                adapter_id, dict(files), display_name, dict(labels or {}), is_abandoned, validate_only=validate_only
            )
        )
        with _disk_errors(adapter_id):
            try:
                return await self._finish(change)
            except asyncio.CancelledError:
                is_abandoned.set()
                await asyncio.wait([change])
                raise

    async def update(
        self,
        adapter_id: str,
        *,
        display_name: str | None = None,
        labels: Mapping[str, str] | None = None,
        etag: str = "",
    ) -> AdapterRecord:
        """Change the description; None leaves a field as it is."""
        if display_name is not None:
            check_display_name(display_name)
        if labels is not None:
            check_labels(labels)

        def change(record: AdapterRecord) -> AdapterRecord:
            return replace(
                record,
                display_name=record.display_name if display_name is None else display_name,
                labels=record.labels if labels is None else dict(labels),
            )

        return await self._finish(self._change(adapter_id, etag, change))

    async def activate(self, adapter_id: str, digest: str, etag: str = "") -> AdapterRecord:
        """Make a registered version the active one."""
        check_digest(digest)

        def change(record: AdapterRecord) -> AdapterRecord:
            version = self._catalog.version(record, digest)
            if trouble := self._catalog.trouble(version):
                raise trouble
            return replace(record, active_digest=digest)

        return await self._finish(self._change(adapter_id, etag, change))

    async def set_pinned(self, adapter_id: str) -> AdapterRecord:
        """Mark as pinned; already pinned is fine."""
        return await self._finish(self._change(adapter_id, "", lambda record: replace(record, is_pinned=True)))

    async def clear_pinned(self, adapter_id: str) -> AdapterRecord:
        """Take the mark back; not pinned is fine."""
        return await self._finish(self._change(adapter_id, "", lambda record: replace(record, is_pinned=False)))

    async def begin_delete(self, adapter_id: str, etag: str = "") -> list[str]:
        """Stop serving the name. Returns the digests that no other name uses, for the tiers to forget."""
        return await self._finish(self._begin_delete(adapter_id, etag))

    async def finish_delete(self, adapter_id: str) -> None:
        """Remove the record and the blobs that no name uses. Call begin_delete first."""
        await self._finish(self._finish_delete(adapter_id))

    # ---- how changes are made ----

    async def _finish(self, change: Coroutine[Any, Any, _T] | asyncio.Task[_T]) -> _T:
        """Run a change to its end even if the caller is cancelled."""
        task = asyncio.ensure_future(change)
        self._changes.add(task)
        task.add_done_callback(self._forget_change)
        return await asyncio.shield(task)

    def _forget_change(self, task: asyncio.Task[Any]) -> None:
        self._changes.discard(task)
        if not task.cancelled() and (error := task.exception()) and not isinstance(error, (MotetError, _Abandoned)):
            logger.error("registry change failed", exc_info=error)

    async def _register(
        self,
        adapter_id: str,
        files: dict[str, Path],
        display_name: str,
        labels: dict[str, str],
        is_abandoned: threading.Event,
        *,
        validate_only: bool,
    ) -> AdapterRecord:
        async with self._ingests:
            scratch = await asyncio.to_thread(
                tempfile.TemporaryDirectory, prefix="motet-pack-", dir=self._scratch_dir, ignore_cleanup_errors=True
            )
            try:
                chunk_paths: list[Path] = []

                def keep_chunk(index: int, chunk: bytes) -> None:
                    if is_abandoned.is_set():
                        raise _Abandoned
                    if not validate_only:
                        chunk_paths.append(Path(scratch.name) / str(index))
                        chunk_paths[-1].write_bytes(chunk)

                packed = await asyncio.to_thread(
                    ingest, files, self._catalog.base_model, max_adapter_bytes=self._max_adapter_bytes, sink=keep_chunk
                )
                if is_abandoned.is_set():
                    raise _Abandoned
                if validate_only:
                    return self._registered(adapter_id, packed, display_name, labels)
                async with self._locks.hold(f"name {adapter_id}"), self._locks.hold(f"blob {packed.digest}"):
                    record = self._registered(adapter_id, packed, display_name, labels)
                    await self._store_version(record, packed, chunk_paths)
                return record
            finally:
                await asyncio.to_thread(scratch.cleanup)

    def _registrable(self, adapter_id: str) -> AdapterRecord | None:
        """The present record of the name, if any. Raises if nothing can be registered under it."""
        record = self._catalog.find(adapter_id)
        if record is not None and record.state is AdapterState.DELETING:
            raise AdapterNotActive(f"adapter {adapter_id!r} is being deleted; register it when that has ended")
        if record is not None and len(record.versions) >= MAX_VERSIONS:
            raise Exhausted(
                f"adapter {adapter_id!r} has {MAX_VERSIONS} versions, the limit; delete it or use another id"
            )
        return record

    def _registered(
        self, adapter_id: str, packed: PackedInfo, display_name: str, labels: dict[str, str]
    ) -> AdapterRecord:
        """The record with this version active."""
        now_s = self._clock()
        version = AdapterVersion(
            digest=packed.digest,
            kind=packed.kind,
            max_rank=packed.max_rank,
            dtype=self._catalog.base_model.dtype,
            size_bytes=packed.size_bytes,
            arena_bytes=packed.arena_bytes,
            target_modules=packed.target_modules,
            create_time_s=now_s,
            base_fingerprint=self._catalog.base_model.fingerprint,
        )
        record = self._registrable(adapter_id)
        if record is None or not record.versions:
            uid = uuid.uuid4().hex
            return AdapterRecord(
                adapter_id=adapter_id,
                uid=uid,
                display_name=display_name,
                labels=labels,
                state=AdapterState.ACTIVE,
                state_reason="",
                versions=(version,),
                active_digest=version.digest,
                is_pinned=False,
                create_time_s=now_s,
                update_time_s=now_s,
            )
        is_known = record.version(version.digest) is not None
        if is_known and record.active_digest == version.digest and record.state is AdapterState.ACTIVE:
            return record
        return replace(
            record,
            display_name=display_name or record.display_name,
            labels=labels or record.labels,
            state=AdapterState.ACTIVE,
            state_reason="",
            versions=record.versions if is_known else (version, *record.versions),
            active_digest=version.digest,
            update_time_s=now_s,
            revision=record.revision + 1,
        )

    async def _store_version(self, record: AdapterRecord, packed: PackedInfo, chunk_paths: list[Path]) -> None:
        """Blob first, then the record that names it.

        A half-written blob goes again. A whole one stays even if the record's write fails: whether that write took
        effect is not known then, and the next start removes blobs that no record names.
        """
        if packed.digest not in self._catalog.blobs:
            chunks = (path.read_bytes() for path in chunk_paths)
            try:
                await asyncio.to_thread(self._store.put_blob, packed.digest, packed.manifest, chunks)
            except BaseException:
                await self._delete_blob(packed.digest)
                raise
            self._catalog.blobs.add(packed.digest)
        if self._catalog.find(record.adapter_id) is not record:
            await asyncio.to_thread(self._store.write_record, record.adapter_id, encode_record(record))
            self._catalog.keep(record)
            logger.info("adapter registered adapter_id=%s digest=%s", record.adapter_id, packed.digest)

    async def _delete_blob(self, digest: str) -> None:
        """Remove a blob; what fails is left for the next start, which removes unnamed blobs."""
        self._catalog.blobs.discard(digest)
        try:
            await asyncio.to_thread(self._store.delete_blob, digest)
        except MotetError as error:
            logger.warning("blob left for the next start digest=%s error=%s", digest, error)

    async def _change(
        self, adapter_id: str, etag: str, change: Callable[[AdapterRecord], AdapterRecord]
    ) -> AdapterRecord:
        check_adapter_id(adapter_id)
        async with self._locks.hold(f"name {adapter_id}"):
            record = self._catalog.current(adapter_id, etag)
            if record.state is AdapterState.DELETING or not record.versions:
                self._catalog.refuse_failed(record)
            changed = change(record)
            if changed == record:
                return record
            changed = replace(changed, update_time_s=self._clock(), revision=record.revision + 1)
            changed = self._catalog.judged(changed)
            await asyncio.to_thread(self._store.write_record, adapter_id, encode_record(changed))
            self._catalog.keep(changed)
            return changed

    async def _begin_delete(self, adapter_id: str, etag: str) -> list[str]:
        async with self._locks.hold(f"name {adapter_id}"):
            record = self._catalog.current(adapter_id, etag)
            if record.state is not AdapterState.DELETING:
                deleting = replace(
                    record,
                    state=AdapterState.DELETING,
                    state_reason="deletion was asked for",
                    is_pinned=False,
                    update_time_s=self._clock(),
                    revision=record.revision + 1,
                )
                if record.versions:  # an unreadable record stays as it is until it is removed
                    await asyncio.to_thread(self._store.write_record, adapter_id, encode_record(deleting))
                self._catalog.keep(deleting)
                logger.info("adapter being deleted adapter_id=%s", adapter_id)
            digests = {version.digest for version in record.versions}
            return sorted(digest for digest in digests if self._catalog.num_names(digest) == 1)

    async def _finish_delete(self, adapter_id: str) -> None:
        async with self._locks.hold(f"name {adapter_id}"):
            record = self.get(adapter_id)
            if record.state is not AdapterState.DELETING:
                raise AdapterNotActive(f"adapter {adapter_id!r} is not being deleted")
            await asyncio.to_thread(self._store.delete_record, adapter_id)
            self._catalog.drop(record)
            for digest in sorted({version.digest for version in record.versions}):
                async with self._locks.hold(f"blob {digest}"):
                    if not self._catalog.num_names(digest):
                        await self._delete_blob(digest)
            logger.info("adapter deleted adapter_id=%s", adapter_id)


@contextmanager
def _disk_errors(adapter_id: str) -> Iterator[None]:
    """Trouble with the files that are read and packed, in a client's words; the log has the rest."""
    try:
        yield
    except OSError as error:
        logger.error("adapter not packed adapter_id=%s error=%s", adapter_id, error)
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise Exhausted("the server has too little disk space to pack this adapter", retry_after_s=60.0) from error
        raise StoreUnavailable("the server could not read and pack the adapter's files; try again") from error


class _Abandoned(Exception):
    """Nobody waits for this registration any more."""
