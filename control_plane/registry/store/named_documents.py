"""Reads documents of records and versions. Each repeats the name or the digest under which it lies."""

from __future__ import annotations

from contract.ids import is_digest
from control_plane.registry.records import AdapterVersion
from control_plane.registry.store.record_documents import StoredRecord, decode_record, decode_version


def record_under(adapter_id: str, document: bytes) -> StoredRecord:
    """The record of this name. Raises ValueError with what is wrong."""
    stored = decode_record(document)
    if stored.record.adapter_id != adapter_id:
        raise ValueError("it is the record of another adapter")
    active = stored.record.active_digest  # empty: all versions are held
    if not all(map(is_digest, stored.digests)) or (active not in ("", *stored.digests) and not is_digest(active)):
        raise ValueError("version_digests or active_digest has a value that is not a digest")
    return stored


def version_under(digest: str, document: bytes) -> AdapterVersion:
    """The version of this digest. Raises ValueError with what is wrong."""
    version = decode_version(document)
    if version.digest != digest:
        raise ValueError("it is the document of another version")
    return version
