"""Brings a store back into order when it is opened: what a crash left half done is finished or removed."""

from __future__ import annotations

import logging
from dataclasses import dataclass

from control_plane.registry.records import AdapterRecord, AdapterState, decode_record
from control_plane.registry.store import DIGEST, ArtifactStore

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Recovered:
    """The content of a store in order."""

    records: list[AdapterRecord]  # unreadable ones are here too, FAILED and without versions
    blobs: frozenset[str]  # complete ones


def recover(store: ArtifactStore) -> Recovered:
    """Read all records; finish deletions, remove half-written and unreferenced blobs, set broken records apart.

    Blobs that no readable record names stay while any record is unreadable: it may be theirs.
    """
    records: list[AdapterRecord] = []
    for adapter_id, raw in store.records():
        try:
            record = decode_record(raw)
            if record.adapter_id != adapter_id:
                raise ValueError("it is another adapter's")
        except ValueError as error:
            logger.error("adapter record unreadable adapter_id=%s reason=%s", adapter_id, error)
            records.append(unreadable(adapter_id, str(error)))
            continue
        if record.state is AdapterState.DELETING:
            logger.info("finishing deletion adapter_id=%s", adapter_id)
            store.delete_record(adapter_id)
            continue
        records.append(record)
    named = {version.digest for record in records for version in record.versions}
    is_any_unreadable = any(not record.versions for record in records)
    complete = set()
    for name, is_complete in store.blobs().items():
        if not DIGEST.match(name):
            logger.warning("directory in the store is no blob, left alone name=%r", name)
        elif not is_complete or (name not in named and not is_any_unreadable):
            logger.info("removing stray blob digest=%s is_complete=%s", name, is_complete)
            store.delete_stray_blob(name)
        else:
            complete.add(name)
    return Recovered(records, frozenset(complete))


def unreadable(adapter_id: str, reason: str) -> AdapterRecord:
    """Stands for a record that cannot be read, so that the name is neither lost nor served."""
    return AdapterRecord(
        adapter_id=adapter_id,
        uid="unreadable",
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
