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
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TypeAlias

from control_plane.registry.records import AdapterVersion
from control_plane.registry.snapshot.entries import (
    FIELDS,
    ModuleLists,
    RecordEntry,
    VersionEntry,
    record_entry,
    stored_record,
    stored_version,
    version_entry,
)
from control_plane.registry.snapshot.snapshot_file import read_frames, write_frames
from control_plane.registry.store.record_documents import StoredRecord

logger = logging.getLogger(__name__)

MIN_READ = 1000  # documents that a start has to read before it writes the file: below, it would save nothing
_OUTDATED_SHARE = 0.1  # of the documents: so many were read although there was a file
_FRAME_SIZE = 1000  # documents; takes a few ms to write
_RECORDS, _VERSIONS = "records", "versions"

_KnownVersion: TypeAlias = tuple[VersionEntry, tuple[str, ...]]  # and its modules
# A name, the tag of its record, and digests and tags of its versions.
KnownTags: TypeAlias = tuple[str, str, tuple[tuple[str, str], ...]]


class KnownDocuments:
    """The documents of one store. Single documents may be taken and added from several threads."""

    def __init__(self, path: Path | None, store: str, *, min_read: int = MIN_READ) -> None:
        """`path`: the local file; None: there is none, and nothing is known. `store`: names the store."""
        self._path = path
        self._subject = (store, FIELDS)
        self._min_read = min_read
        self._records: dict[str, RecordEntry] = {}
        self._versions: dict[tuple[str, str], _KnownVersion] = {}  # by id and digest
        self._seen_records: list[RecordEntry] = []
        self._seen_versions: list[_KnownVersion] = []
        self._modules: dict[tuple[str, ...], tuple[str, ...]] = {}  # equal lists of modules are one object
        self._writing: threading.Thread | None = None
        self.num_known = 0  # documents that were taken from the file
        self.num_read = 0  # documents that were read from the store

    def load(self) -> None:
        """Read the file. What is wrong with it is a line in the log."""
        if self._path is None:
            return
        for kind, lists, entries in read_frames(self._path, self._subject):
            if kind == _RECORDS:
                self._records.update({entry[0]: entry for entry in entries})
            else:
                modules = self.shared_lists(lists)
                for entry in entries:
                    self._versions[entry[0], entry[1]] = (entry, modules[entry[3]])

    def shared_lists(self, lists: Sequence[tuple[str, ...]]) -> list[tuple[str, ...]]:
        """Equal lists of modules, each as the one object that all versions have."""
        return [self._modules.setdefault(names, names) for names in lists]

    def record_tag(self, adapter_id: str) -> str:
        """The tag of the state in which a record is known; empty: it is not known."""
        known = self._records.get(adapter_id)
        return "" if known is None else known[1]

    def version_tag(self, name: tuple[str, str]) -> str:
        """The tag of the state in which the version of this id and digest is known; empty: it is not known."""
        known = self._versions.get(name)
        return "" if known is None else known[0][2]

    def tags(self, adapter_id: str) -> KnownTags:
        """The tags under which a record is known and, as far as they are, its versions."""
        known = self._records.get(adapter_id)
        if known is None:
            return adapter_id, "", ()
        versions = ((digest, self.version_tag((adapter_id, digest))) for digest in known[2])
        return adapter_id, known[1], tuple([version for version in versions if version[1]])

    def record(self, adapter_id: str) -> StoredRecord:
        """A record whose present state is the known one."""
        entry = self._records.pop(adapter_id)
        self.num_known += 1
        self._seen_records.append(entry)
        return stored_record(entry)

    def version(self, name: tuple[str, str]) -> AdapterVersion:
        """A version whose present state is the known one."""
        known = self._versions.pop(name)
        self.num_known += 1
        self._seen_versions.append(known)
        return stored_version(*known)

    def read_record(self, entry: RecordEntry) -> StoredRecord:
        """A record that another process read."""
        self.num_read += 1
        if self._path is not None:
            self._seen_records.append(entry)
        return stored_record(entry)

    def read_version(self, entry: VersionEntry, modules: tuple[str, ...]) -> AdapterVersion:
        """A version that another process read."""
        self.num_read += 1
        if self._path is not None:
            self._seen_versions.append((entry, modules))
        return stored_version(entry, modules)

    def add_record(self, adapter_id: str, tag: str, stored: StoredRecord) -> None:
        """Keep a record that was read here. One in an old format is written anew, and has another tag then."""
        self.num_read += 1
        if self._path is not None and not stored.is_old:
            self._seen_records.append(record_entry(adapter_id, tag, stored))

    def add_version(self, adapter_id: str, tag: str, version: AdapterVersion) -> None:
        """Keep a version that was read here."""
        self.num_read += 1
        if self._path is not None:
            self._seen_versions.append((version_entry(adapter_id, tag, version, {}), version.target_modules))

    def finish(self) -> None:
        """Begin to write the file anew in a thread, if a start would gain by it. All documents were looked at."""
        self._records, self._versions, self._modules = {}, {}, {}
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

    def _write(self, path: Path, records: list[RecordEntry], versions: list[_KnownVersion]) -> None:
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


def _frames(records: list[RecordEntry], versions: list[_KnownVersion]) -> Iterator[object]:
    for start in range(0, len(records), _FRAME_SIZE):
        yield _RECORDS, [], records[start : start + _FRAME_SIZE]
    for start in range(0, len(versions), _FRAME_SIZE):
        lists: ModuleLists = {}
        entries = []
        for (adapter_id, digest, tag, _, values), modules in versions[start : start + _FRAME_SIZE]:
            entries.append((adapter_id, digest, tag, lists.setdefault(modules, len(lists)), values))
        yield _VERSIONS, list(lists), entries
