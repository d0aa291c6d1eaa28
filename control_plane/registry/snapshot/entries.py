"""Records and versions as plain values, which `marshal` takes: in the snapshot, and from a process that read them."""

from __future__ import annotations

from dataclasses import asdict, fields
from functools import lru_cache
from operator import attrgetter
from typing import Any, TypeAlias

from control_plane.access.visibility import Ownership, Visibility
from control_plane.registry.records import AdapterRecord, AdapterState, AdapterVersion
from control_plane.registry.store.record_documents import StoredRecord, make_record, make_stored, make_version
from control_plane.registry.versions.rollout import NO_ROLLOUT, decode_rollout, encode_rollout
from control_plane.registry.versions.verification import Verification
from control_plane.signatures.verdict import SignatureMethod, SignatureVerdict

_RECORD_FIELDS = [f.name for f in fields(AdapterRecord)]
_ID, _ACTIVE, _STATE, _REASON, _OF_RECORD, _OWNERSHIP, _ROLLOUT = map(
    _RECORD_FIELDS.index,
    ("adapter_id", "active_digest", "state", "state_reason", "versions", "ownership", "rollout"),
)
_MODULES = [f.name for f in fields(AdapterVersion)].index("target_modules")
_VERSION_FIELDS = [f.name for f in fields(AdapterVersion) if f.name != "target_modules"]
_SIGNATURE, _VERIFICATION = _VERSION_FIELDS.index("signature"), _VERSION_FIELDS.index("verification")
_record_values = attrgetter(*_RECORD_FIELDS)
_version_values = attrgetter(*_VERSION_FIELDS)
# What the values mean: a field more, or one of another type, and they are read from the store again.
FIELDS = tuple(
    (kind.__name__, tuple((f.name, str(f.type)) for f in fields(kind)))
    for kind in (AdapterRecord, AdapterVersion, SignatureVerdict, Verification, Ownership)
)

RecordEntry: TypeAlias = tuple[str, str, tuple[str, ...], tuple[Any, ...]]  # id, tag, digests of versions, values
VersionEntry: TypeAlias = tuple[str, str, str, int, tuple[Any, ...]]  # id, digest, tag, place of its modules, values
# Lists of modules with their places, each once: most versions have the modules of another one.
ModuleLists: TypeAlias = dict[tuple[str, ...], int]


def record_entry(adapter_id: str, tag: str, stored: StoredRecord) -> RecordEntry:
    """The entry of a record that was read in the state that `tag` names. It is not in an old format."""
    values = list(_record_values(stored.record))
    values[_STATE], values[_REASON], values[_OF_RECORD] = None, "", ()  # none of them is in a record's document
    ownership = stored.record.ownership
    values[_OWNERSHIP] = (ownership.owner, ownership.visibility.value, ownership.shared_with)
    rollout = stored.record.rollout
    values[_ROLLOUT] = {} if rollout is NO_ROLLOUT else encode_rollout(rollout)
    # Equal texts as one object: `marshal` sends it once, and whoever loads it has it once.
    values[_ID] = adapter_id
    if values[_ACTIVE] in stored.digests:
        values[_ACTIVE] = stored.digests[stored.digests.index(values[_ACTIVE])]
    return adapter_id, tag, stored.digests, tuple(values)


def stored_record(entry: RecordEntry) -> StoredRecord:
    """The record of an entry."""
    _, _, digests, known = entry
    values = list(known)
    values[_STATE] = AdapterState.ACTIVE
    values[_OWNERSHIP] = _ownership_of(*values[_OWNERSHIP])
    values[_ROLLOUT] = decode_rollout(dict(values[_ROLLOUT])) if values[_ROLLOUT] else NO_ROLLOUT
    return make_stored(make_record(*values), digests, False)


def version_entry(adapter_id: str, tag: str, version: AdapterVersion, lists: ModuleLists) -> VersionEntry:
    """The entry of a version that was read in the state that `tag` names. Its modules have a place in `lists` then."""
    place = lists.setdefault(version.target_modules, len(lists))
    return adapter_id, version.digest, tag, place, _without_verdicts(_version_values(version))


def stored_version(entry: VersionEntry, modules: tuple[str, ...]) -> AdapterVersion:
    """The version of an entry with these modules."""
    values = list(entry[4])
    if values[_SIGNATURE] is not None or values[_VERIFICATION] is not None:
        _put_verdicts(values)
    values.insert(_MODULES, modules)
    return make_version(*values)


@lru_cache(maxsize=1024)
def _ownership_of(owner: str, visibility: str, tenants: tuple[str, ...]) -> Ownership:
    """One object for many names."""
    return Ownership(owner, Visibility(visibility), tenants)


def _without_verdicts(values: tuple[Any, ...]) -> tuple[Any, ...]:
    """The values of a version with plain ones in the place of signature and verification."""
    signature, verification = values[_SIGNATURE], values[_VERIFICATION]
    if signature is None and verification is None:
        return values
    plain = list(values)
    if signature is not None:
        plain[_SIGNATURE] = asdict(signature) | {"method": signature.method.value}
    if verification is not None:
        plain[_VERIFICATION] = asdict(verification)
    return tuple(plain)


def _put_verdicts(values: list[Any]) -> None:
    """Put back what `_without_verdicts` took out."""
    if signature := values[_SIGNATURE]:
        values[_SIGNATURE] = SignatureVerdict(**signature | {"method": SignatureMethod(signature["method"])})
    if verification := values[_VERIFICATION]:
        values[_VERIFICATION] = Verification(**verification)
