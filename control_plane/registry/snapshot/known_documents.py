"""The documents that an earlier start read, each with the tag of the state that it was read in.

A start compares each tag with the present one and reads only what changed: a look at a file takes a fifth of opening,
reading and parsing it. The store stays the truth; without this file, or with a damaged one, a start reads everything.
Only for a store that nobody else can write to, whose tags are those of files: Motet gives every file it writes a tag of
its own (`store/directory_store.py`).
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict, fields
from functools import lru_cache
from operator import attrgetter
from pathlib import Path
from typing import Any, TypeAlias

from control_plane.access.visibility import Ownership, Visibility
from control_plane.registry.records import AdapterRecord, AdapterState, AdapterVersion, StoredRecord
from control_plane.registry.snapshot.snapshot_file import read_frames, write_frames
from control_plane.registry.versions.rollout import NO_ROLLOUT, decode_rollout, encode_rollout
from control_plane.registry.versions.verification import Verification
from control_plane.signatures.verdict import SignatureMethod, SignatureVerdict

logger = logging.getLogger(__name__)

MIN_READ = 1000  # documents that a start has to read before it writes the file: below, it would save nothing
_OUTDATED_SHARE = 0.1  # of the documents: so many were read although there was a file
_FRAME_SIZE = 1000  # documents; takes a few ms to write
_RECORDS, _VERSIONS = "records", "versions"

_RECORD_FIELDS = [f.name for f in fields(AdapterRecord)]
_STATE, _REASON, _OF_RECORD, _OWNERSHIP, _ROLLOUT = map(
    _RECORD_FIELDS.index, ("state", "state_reason", "versions", "ownership", "rollout")
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


_KnownRecord: TypeAlias = tuple[str, str, tuple[str, ...], tuple[Any, ...]]  # id, tag, digests of versions, values
# Id, digest, tag, place of its modules in the frame, values; and its modules.
_KnownVersion: TypeAlias = tuple[tuple[str, str, str, int, tuple[Any, ...]], tuple[str, ...]]


class KnownDocuments:
    """The documents of one store. Single documents may be taken and added from several threads."""

    def __init__(self, path: Path | None, store: str, *, min_read: int = MIN_READ) -> None:
        """`path`: the local file; None: there is none, and nothing is known. `store`: names the store."""
        self._path = path
        self._subject = (store, FIELDS)
        self._min_read = min_read
        self._records: dict[str, _KnownRecord] = {}
        self._versions: dict[tuple[str, str], _KnownVersion] = {}  # by id and digest
        self._seen_records: list[tuple[str, str, StoredRecord]] = []  # id, tag
        self._seen_versions: list[tuple[str, str, AdapterVersion]] = []  # id, tag
        self._writing: threading.Thread | None = None
        self.num_known = 0  # documents that were taken from the file
        self.num_read = 0  # documents that were read from the store

    def load(self) -> None:
        """Read the file. What is wrong with it is a line in the log."""
        if self._path is None:
            return
        shared: dict[tuple[str, ...], tuple[str, ...]] = {}  # equal lists of modules are one object
        for kind, lists, entries in read_frames(self._path, self._subject):
            if kind == _RECORDS:
                self._records.update({entry[0]: entry for entry in entries})
            else:
                modules = [shared.setdefault(names, names) for names in lists]
                for entry in entries:
                    self._versions[entry[0], entry[1]] = (entry, modules[entry[3]])

    def record_tag(self, adapter_id: str) -> str:
        """The tag of the state in which a record is known; empty: it is not known."""
        known = self._records.get(adapter_id)
        return "" if known is None else known[1]

    def version_tag(self, name: tuple[str, str]) -> str:
        """The tag of the state in which the version of this id and digest is known; empty: it is not known."""
        known = self._versions.get(name)
        return "" if known is None else known[0][2]

    def record(self, adapter_id: str) -> StoredRecord:
        """A record whose present state is the known one."""
        _, tag, digests, known = self._records.pop(adapter_id)
        values = list(known)
        values[_STATE] = AdapterState.ACTIVE
        values[_OWNERSHIP] = _ownership_of(*values[_OWNERSHIP])
        values[_ROLLOUT] = decode_rollout(values[_ROLLOUT]) if values[_ROLLOUT] else NO_ROLLOUT
        stored = StoredRecord(AdapterRecord(*values), digests, is_old=False)
        self.num_known += 1
        self._seen_records.append((adapter_id, tag, stored))
        return stored

    def version(self, name: tuple[str, str]) -> AdapterVersion:
        """A version whose present state is the known one."""
        (_, _, tag, _, known), modules = self._versions.pop(name)
        values = list(known)
        if values[_SIGNATURE] is not None or values[_VERIFICATION] is not None:
            _put_verdicts(values)
        values.insert(_MODULES, modules)
        version = AdapterVersion(*values)
        self.num_known += 1
        self._seen_versions.append((name[0], tag, version))
        return version

    def add_record(self, adapter_id: str, tag: str, stored: StoredRecord) -> None:
        """Keep a record that was read. One in an old format is written anew, and has another tag then."""
        self.num_read += 1
        if self._path is not None and not stored.is_old:
            self._seen_records.append((adapter_id, tag, stored))

    def add_version(self, adapter_id: str, tag: str, version: AdapterVersion) -> None:
        """Keep a version that was read."""
        self.num_read += 1
        if self._path is not None:
            self._seen_versions.append((adapter_id, tag, version))

    def finish(self) -> None:
        """Begin to write the file anew in a thread, if a start would gain by it. All documents were looked at."""
        self._records, self._versions = {}, {}
        records, self._seen_records = self._seen_records, []
        versions, self._seen_versions = self._seen_versions, []
        if self._path is None or self.num_read < max(self._min_read, _OUTDATED_SHARE * self.num_known):
            return
        arguments = (self._path, records, versions)
        self._writing = threading.Thread(target=self._write, args=arguments, name="motet-snapshot", daemon=True)
        self._writing.start()

    def wait(self) -> None:
        """Wait until the file is written, if it is being written."""
        if self._writing is not None:
            self._writing.join()

    def _write(
        self, path: Path, records: list[tuple[str, str, StoredRecord]], versions: list[tuple[str, str, AdapterVersion]]
    ) -> None:
        begun_s = time.perf_counter()
        try:
            write_frames(path, self._subject, _frames(records, versions))
        except OSError as error:
            logger.warning("snapshot not written, the next start reads every document path=%s error=%s", path, error)
            return
        logger.info(
            "snapshot written path=%s num_documents=%d duration_s=%.2f",
            path,
            len(records) + len(versions),
            time.perf_counter() - begun_s,
        )


def _frames(
    records: list[tuple[str, str, StoredRecord]], versions: list[tuple[str, str, AdapterVersion]]
) -> Iterator[object]:
    for start in range(0, len(records), _FRAME_SIZE):
        yield _RECORDS, [], [_of_record(*seen) for seen in records[start : start + _FRAME_SIZE]]
    for start in range(0, len(versions), _FRAME_SIZE):
        places: dict[tuple[str, ...], int] = {}  # lists of modules, each once in a frame
        entries = []
        for adapter_id, tag, version in versions[start : start + _FRAME_SIZE]:
            place = places.setdefault(version.target_modules, len(places))
            entries.append((adapter_id, version.digest, tag, place, _without_verdicts(_version_values(version))))
        yield _VERSIONS, list(places), entries


def _of_record(adapter_id: str, tag: str, stored: StoredRecord) -> _KnownRecord:
    values = list(_record_values(stored.record))
    values[_STATE], values[_REASON], values[_OF_RECORD] = None, "", ()  # none of them is in a record's document
    ownership = stored.record.ownership
    values[_OWNERSHIP] = (ownership.owner, ownership.visibility.value, ownership.shared_with)
    values[_ROLLOUT] = encode_rollout(stored.record.rollout)
    return adapter_id, tag, stored.digests, tuple(values)


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
