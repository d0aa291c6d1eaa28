"""The verdict on a signature becomes part of a version's record."""

from __future__ import annotations

from dataclasses import replace

from control_plane.registry.records import Registered
from control_plane.signatures.verdict import SignatureVerdict


def with_signature(registered: Registered, digest: str, signature: SignatureVerdict | None, now_s: float) -> Registered:
    """`registered`, where the version has this verdict.

    The same files registered again with another valid signature replace the verdict; without one they leave it.
    """
    record = registered.record
    version = record.version(digest)
    assert version is not None, "the version that is being registered is one of the record's"
    if signature is None or (version.signature is not None and version.signature.is_alike(signature)):
        return registered
    versions = tuple(replace(each, signature=signature) if each is version else each for each in record.versions)
    changed = replace(record, versions=versions)
    if record is registered.previous:
        changed = replace(changed, update_time_s=now_s, revision=record.revision + 1)
    return replace(registered, record=changed)
