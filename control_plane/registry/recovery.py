"""Brings a store back into order when it is opened: what a crash left half done is finished or removed.

Small files are read many at a time, since one read of an object store takes tens of milliseconds.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TypeVar

from control_plane.registry.records import AdapterRecord, AdapterState, AdapterVersion
from control_plane.registry.snapshot.known_documents import KnownDocuments
from control_plane.registry.store.artifact_store import ArtifactStore
from control_plane.registry.store.named_documents import record_under, version_under
from control_plane.registry.store.read_ahead import MAX_PROCESSES, Found, ReadAhead
from control_plane.registry.store.record_documents import (
    StoredRecord,
    decode_record,
    encode_record,
    encode_version,
    with_versions,
)
from control_plane.store_calls import StoreCalls

logger = logging.getLogger(__name__)

UNREADABLE_UID = "unreadable"
_FIRST = 32  # items that are read to learn how far away the storage is
_FAR_S = 0.002  # an item of a local directory takes 0.1 ms, one of an object store 5 to 50 ms
_FAR_AT_ONCE, _FAR_SIZE = 32, 16
_NEAR_AT_ONCE, _NEAR_SIZE = 1, 1024  # two threads would take turns at the interpreter, and be slower
_MANY = 10_000  # records
_GONE = "its document is gone"  # of a version
_T = TypeVar("_T")
_Item = TypeVar("_Item")


@dataclass(frozen=True)
class Recovered:
    """The content of a store in order."""

    records: list[AdapterRecord]  # unreadable ones are here too, FAILED and without versions
    blobs: frozenset[str]  # complete ones


async def recover(
    store: ArtifactStore, calls: StoreCalls, known: KnownDocuments | None = None, *, min_ahead: int = _MANY
) -> Recovered:
    """Read all records; finish deletions, remove half-written and unreferenced blobs, set broken records apart.

    `known`: what an earlier start read; it is not read again where the store has it in the same state. Of no use where
    other processes can write, and where a look at a document takes as long as reading it.

    `min_ahead`: of so many records on, those in a directory are read by further processes, if there are cores for them.

    Blobs that no readable record names stay while any record is unreadable: it may be theirs. So do, in a store that
    others could reach, those that another process may be writing.
    """
    # Hundreds of thousands of objects are made and none is dropped: looks for garbage would take a fifth of the time.
    is_collecting = gc.isenabled()
    gc.disable()
    try:
        if known is None or not store.is_sole:
            known = KnownDocuments(None, "")
        ahead = ReadAhead()
        try:
            recovered = await _recover(store, calls, known, ahead, min_ahead)
        finally:
            ahead.close()
        known.finish()
        if len(recovered.records) >= _MANY:  # nor do they look at these records later on: each look would take 0.2 s
            gc.freeze()
        return recovered
    finally:
        if is_collecting:
            gc.enable()


async def _recover(
    store: ArtifactStore, calls: StoreCalls, known: KnownDocuments, ahead: ReadAhead, min_ahead: int
) -> Recovered:
    num_cores = os.cpu_count() or 1
    if store.directory is not None and num_cores > 1 and await calls.read(_has_records, store.directory, min_ahead):
        ahead.start(store.directory, min(num_cores, MAX_PROCESSES))  # they start while this one goes on
    await asyncio.to_thread(known.load)
    names = await calls.read(partial(store.list_names, when_records=partial(ahead.request, known)))
    for adapter_id in names.deleting:
        logger.info("finishing deletion adapter_id=%s", adapter_id)
        await calls.change(store.delete_versions, adapter_id)
    found = Found()
    while await calls.read(ahead.take, found, known):
        pass
    left = [adapter_id for adapter_id in names.records if adapter_id not in found.records]
    # Every record has its place before it comes, so that the order is that of the names.
    stored: dict[str, StoredRecord | str] = dict.fromkeys(names.records, "")
    stored |= found.records
    stored |= await _each(calls, partial(_read_record, store, known), left)
    for adapter_id, one in stored.items():
        if isinstance(one, StoredRecord) and one.record.state is AdapterState.DELETING:
            await calls.change(partial(store.delete_record, adapter_id, expected=_is_old))
    whole, is_all_read = await _whole_records(store, calls, known, stored, found.versions)
    for adapter_id in sorted(set(names.versions) - set(names.records) - set(names.deleting)):
        await calls.change(store.delete_versions, adapter_id)
    blobs = await _blobs_in_order(store, calls, names.blobs, whole, found.blobs, is_all_read=is_all_read)
    await calls.change(store.format.mark)
    return Recovered(whole, blobs)


def _has_records(directory: Path, count: int) -> bool:
    """Whether the store in a directory has so many records, or leftovers of them."""
    try:
        with os.scandir(directory / "adapters") as entries:
            return sum(1 for _ in islice(entries, count)) == count
    except FileNotFoundError:
        return False


def unreadable(adapter_id: str, reason: str) -> AdapterRecord:
    """Stands for a record that cannot be read, so that the name is neither lost nor served."""
    return AdapterRecord(
        adapter_id=adapter_id,
        uid=UNREADABLE_UID,
        display_name="",
        labels={},
        state=AdapterState.FAILED,
        state_reason=f"its stored record cannot be read: {reason}; register it again or delete it",
        versions=(),
        active_digest="",
        is_pinned=False,
        create_time_s=0.0,
        update_time_s=0.0,
    )


def _read_record(store: ArtifactStore, known: KnownDocuments, adapter_id: str) -> StoredRecord | str:
    """The record, or why it cannot be read."""
    try:
        known_tag = known.record_tag(adapter_id)
        document, tag = store.read_record(adapter_id, known_tag)
        if tag == known_tag:
            return known.record(adapter_id)
        stored = record_under(adapter_id, document)
    except FileNotFoundError:
        return "it is gone"
    except ValueError as error:
        return str(error)
    known.add_record(adapter_id, tag, stored)
    return stored


async def _whole_records(
    store: ArtifactStore,
    calls: StoreCalls,
    known: KnownDocuments,
    stored: Mapping[str, StoredRecord | str],
    found: Mapping[tuple[str, str], AdapterVersion],
) -> tuple[list[AdapterRecord], bool]:
    """The records with their versions, of which some were found already, and whether all of them could be read.

    Records that hold the versions themselves are written in the present format.
    """
    left = [
        (adapter_id, digest)
        for adapter_id, one in stored.items()
        if isinstance(one, StoredRecord) and not one.is_old
        for digest in one.digests
        if (adapter_id, digest) not in found
    ]
    read = await _each(calls, partial(_read_version, store, known), left)
    records, is_all_read = [], True
    for adapter_id, one in stored.items():
        if isinstance(one, str):
            is_all_read = False
            logger.error("adapter record unreadable adapter_id=%s reason=%s", adapter_id, one)
            records.append(unreadable(adapter_id, one))
        elif one.record.state is AdapterState.DELETING:
            continue
        elif one.is_old:
            await calls.change(_write_anew, store, one.record)
            records.append(one.record)
        else:
            versions: dict[str, AdapterVersion] = {}
            for digest in one.digests:
                match found.get((adapter_id, digest)) or read[adapter_id, digest]:
                    case AdapterVersion() as version:
                        versions[digest] = version
                    case reason:
                        # Gone: a version that was deleted, if the record could not be written after that.
                        if reason != _GONE or digest == one.record.active_digest:
                            is_all_read = False
                        logger.warning("version left out adapter_id=%s digest=%s: %s", adapter_id, digest, reason)
            records.append(with_versions(one, versions))
    return records, is_all_read


def _read_version(store: ArtifactStore, known: KnownDocuments, name: tuple[str, str]) -> AdapterVersion | str:
    """The version, or why it cannot be read."""
    try:
        known_tag = known.version_tag(name)
        document, tag = store.read_version(*name, known_tag)
        if tag == known_tag:
            return known.version(name)
        version = version_under(name[1], document)
    except FileNotFoundError:
        return _GONE
    except ValueError as error:
        return str(error)
    known.add_version(name[0], tag, version)
    return version


def _write_anew(store: ArtifactStore, record: AdapterRecord) -> None:
    """Versions first: after a crash in between the old record still holds them all."""
    for version in record.versions:
        store.write_version(record.adapter_id, version.digest, encode_version(version))
    store.write_record(record.adapter_id, encode_record(record), expected=_is_old)
    logger.info("adapter record written again adapter_id=%s num_versions=%d", record.adapter_id, len(record.versions))


def _is_old(document: bytes | None) -> bool:
    """Whether a record is still in the format that holds its versions. No server writes it any more."""
    try:
        return document is not None and decode_record(document).is_old
    except ValueError:
        return False


async def _blobs_in_order(
    store: ArtifactStore,
    calls: StoreCalls,
    names: Sequence[str],
    records: list[AdapterRecord],
    found: set[str],
    *,
    is_all_read: bool,
) -> frozenset[str]:
    """The blobs that are complete and named; some were found already. Others are removed if nobody has them."""
    named = {version.digest for record in records for version in record.versions}
    complete = found.intersection(named, names)
    others = [digest for digest in names if digest not in complete]
    whole = await _each(calls, store.has_blob, [digest for digest in others if digest not in found])
    for digest in others:
        is_complete = digest in found or whole[digest]
        if is_complete and (digest in named or not is_all_read):
            complete.add(digest)
        elif await calls.read(store.may_be_written, digest):
            logger.info("stray blob may be in use, left for a later start digest=%s", digest)
        else:
            logger.info("removing stray blob digest=%s is_complete=%s", digest, is_complete)
            await calls.change(store.delete_blob, digest)
    return frozenset(complete)


async def _each(calls: StoreCalls, read: Callable[[_Item], _T], all_items: Sequence[_Item]) -> dict[_Item, _T]:
    """What `read` gives for each item, many at a time, in the order of the items.

    A storage that responds at once is read by few threads, many items at a call: more would wait for each other. One
    that is far away is read by many threads.
    """
    found: dict[_Item, _T] = {}
    first = await asyncio.gather(*(calls.read(_timed, read, item) for item in all_items[:_FIRST]))
    found.update(zip(all_items, (result for result, _ in first), strict=False))
    is_far = min((took_s for _, took_s in first), default=0.0) > _FAR_S
    at_once, size = (_FAR_AT_ONCE, _FAR_SIZE) if is_far else (_NEAR_AT_ONCE, _NEAR_SIZE)
    batches = iter([all_items[start : start + size] for start in range(_FIRST, len(all_items), size)])

    async def read_on() -> None:
        for batch in batches:
            found.update(zip(batch, await calls.read(_results_of, read, batch), strict=True))

    # Every result has its place before it comes, so that the order is that of the items.
    found = dict.fromkeys(all_items) | found  # type: ignore[assignment]
    async with asyncio.TaskGroup() as group:
        for _ in range(at_once):
            group.create_task(read_on())
    return found


def _timed(read: Callable[[_Item], _T], item: _Item) -> tuple[_T, float]:
    """What `read` gives, and the seconds that it took."""
    started_s = time.perf_counter()
    return read(item), time.perf_counter() - started_s


def _results_of(read: Callable[[_Item], _T], items: Sequence[_Item]) -> list[_T]:
    return [read(item) for item in items]
