"""Writes the documents of names, each only in the state that this server knows: compare-and-set.

One server uses a store at a time, and a lease sees to that on an object store. But a lease can be outlived by a process
that was paused, and an operator can be wrong. Then another server may have changed a name: the change that came second
fails with EtagMismatch, and the catalog has what the store has.
"""

from __future__ import annotations

import json
import logging

from control_plane.errors import EtagMismatch, Exhausted, MotetError, StoreUnavailable
from control_plane.registry.catalog import Catalog
from control_plane.registry.records import AdapterRecord, AdapterState, AdapterVersion
from control_plane.registry.recovery import UNREADABLE_UID, unreadable
from control_plane.registry.store.artifact_store import ArtifactStore, DocumentChanged
from control_plane.registry.store.record_documents import (
    decode_record,
    decode_version,
    encode_record,
    encode_version,
    with_versions,
)
from control_plane.store_calls import StoreCalls

logger = logging.getLogger(__name__)


class Documents:
    """The documents of all names. The caller holds the name's lock."""

    def __init__(self, store: ArtifactStore, calls: StoreCalls, catalog: Catalog) -> None:
        self._store = store
        self._calls = calls
        self._catalog = catalog
        # By name, where memory and store differ: a document whose write failed, so that it may be there; and the
        # revision of a record that could not be written on a full disk.
        self._uncertain: dict[str, bytes] = {}
        self._stored_revision: dict[str, int] = {}

    async def write_record(self, record: AdapterRecord, previous: AdapterRecord | None) -> None:
        """Write a record to the store in place of `previous`, then keep it. Raises EtagMismatch.

        It is encoded in the thread: it may name many versions.
        """
        name = record.adapter_id

        def write() -> None:
            document = encode_record(record)
            try:
                self._store.write_record(name, document, expected=lambda found: self._is_of(name, found, previous))
            except StoreUnavailable:
                self._uncertain[name] = document
                raise

        try:
            await self._calls.change(write)
        except DocumentChanged:
            raise await self._changed_elsewhere(name) from None
        self._forget(name)
        self._catalog.put(record)

    async def confirm(self, record: AdapterRecord) -> None:
        """Raise EtagMismatch unless the store has the record as it is here: for a change that changes nothing."""
        if self._store.is_sole:
            return
        name = record.adapter_id
        try:
            found, _ = await self._calls.read(self._store.read_record, name)
        except FileNotFoundError:
            found = None
        if not self._is_of(name, found, record):
            raise await self._changed_elsewhere(name)

    async def delete_record(self, record: AdapterRecord) -> None:
        """Remove the record of a name: from here on the name does not exist in the store. Raises EtagMismatch."""
        name = record.adapter_id

        def delete() -> None:
            self._store.delete_record(name, expected=lambda found: found is None or self._is_of(name, found, record))

        try:
            await self._calls.change(delete)
        except DocumentChanged:
            raise await self._changed_elsewhere(name) from None
        self._forget(name)

    async def write_version(self, adapter_id: str, version: AdapterVersion) -> None:
        """Write the document of a version, before the record that names it."""
        await self._calls.change(lambda: self._store.write_version(adapter_id, version.digest, encode_version(version)))

    async def remove_version(self, record: AdapterRecord, remaining: AdapterRecord, version: AdapterVersion) -> None:
        """Write and keep the record without a version, then remove the version's document. Raises EtagMismatch.

        On a full disk the document goes all the same, and the record names the version until it is written again: a
        version without a document does not exist.
        """
        try:
            await self.write_record(remaining, record)
        except Exhausted as error:
            logger.warning(
                "record names a deleted version until it is written adapter_id=%s: %s", record.adapter_id, error
            )
            await self._delete_version(record.adapter_id, version)
            self._stored_revision.setdefault(record.adapter_id, record.revision)
            self._catalog.put(remaining)
            return
        try:
            await self._delete_version(record.adapter_id, version)
        except MotetError as error:
            logger.warning("document of a deleted version left adapter_id=%s: %s", record.adapter_id, error)

    async def delete_versions(self, record: AdapterRecord) -> None:
        """Remove the documents of all versions of a name whose record is gone, but none that another server wrote."""
        if self._store.is_sole:
            await self._calls.change(self._store.delete_versions, record.adapter_id)
            return
        for version in record.versions:
            await self._delete_version(record.adapter_id, version)

    async def _delete_version(self, adapter_id: str, version: AdapterVersion) -> None:
        def is_known(found: bytes | None) -> bool:
            try:
                return found is None or decode_version(found) == version
            except ValueError:
                return False

        def delete() -> None:
            try:
                self._store.delete_version(adapter_id, version.digest, expected=is_known)
            except DocumentChanged:
                logger.warning(
                    "document of a version stays, it is another server's adapter_id=%s digest=%s",
                    adapter_id,
                    version.digest,
                )

        await self._calls.change(delete)

    def _is_of(self, name: str, found: bytes | None, known: AdapterRecord | None) -> bool:
        """Whether a document is that of the record that this server knows."""
        if found is not None and found == self._uncertain.get(name):
            return True
        if known is None or found is None:
            return (known is None and found is None) or (known is not None and known.uid == UNREADABLE_UID)
        try:
            stored = decode_record(found).record
        except json.JSONDecodeError:
            return True  # damaged: no server writes such a thing
        except ValueError:
            return known.uid == UNREADABLE_UID
        revision = self._stored_revision.get(name, known.revision)
        return (stored.uid, stored.revision) == (known.uid, revision)

    def _forget(self, name: str) -> None:
        self._uncertain.pop(name, None)
        self._stored_revision.pop(name, None)

    async def _changed_elsewhere(self, name: str) -> EtagMismatch:
        """Take the name over from the store as it is there; the error for the caller."""
        self._forget(name)
        record, blobs = await self._calls.read(self._read, name)
        self._catalog.blobs.update(blobs)
        known = self._catalog.find(name)
        if record is not None:
            self._catalog.put(record)
        elif known is not None and known.state is not AdapterState.DELETING:
            self._catalog.remove(known)
        logger.warning("adapter was changed by another server, read again adapter_id=%s", name)
        return EtagMismatch(
            f"adapter {name!r} was changed by another server that uses the same artifact store; read it again and retry"
        )

    def _read(self, name: str) -> tuple[AdapterRecord | None, set[str]]:
        """The record of a name as the store has it, and which of its versions' blobs are complete."""
        try:
            stored = decode_record(self._store.read_record(name)[0])
        except FileNotFoundError:
            return None, set()
        except ValueError as error:
            return unreadable(name, str(error)), set()
        versions = {}
        for digest in stored.digests:
            try:
                versions[digest] = decode_version(self._store.read_version(name, digest)[0])
            except (FileNotFoundError, ValueError) as error:
                logger.warning("version left out adapter_id=%s digest=%s: %s", name, digest, error)
        return with_versions(stored, versions), {digest for digest in versions if self._store.has_blob(digest)}
