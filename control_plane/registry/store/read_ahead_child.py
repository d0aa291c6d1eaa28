"""A process that reads and parses documents of a store's directory for a start, see read_ahead.py.

Standard input has one frame, a list of names with the tags under which their documents are known (`KnownTags`).
Standard output has frames of what was found, each some hundred documents. What could not be read, or is not as it
should be, is in none of them: the server looks at it itself.
"""

from __future__ import annotations

import gc
import marshal
import os
import struct
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from control_plane.registry.snapshot.entries import (
    ModuleLists,
    RecordEntry,
    VersionEntry,
    record_entry,
    version_entry,
)
from control_plane.registry.snapshot.known_documents import KnownTags
from control_plane.registry.store.directory_store import DirectoryStore
from control_plane.registry.store.keys import manifest_key, record_key, version_key
from control_plane.registry.store.named_documents import record_under, version_under
from control_plane.registry.store.store import read_document

FRAME_LENGTH = struct.Struct("<Q")
_FRAME_SIZE = 512  # documents, of a few hundred bytes each


class Frame(NamedTuple):
    """What was found of some names, as plain values."""

    num_names: list[int]  # that were looked at, one item
    records: list[RecordEntry]
    same_records: list[str]  # ids, in the state in which they are known
    lists: list[tuple[str, ...]]  # of modules, where `versions` point to
    versions: list[VersionEntry]
    same_versions: list[tuple[str, str]]  # ids and digests, in the state in which they are known
    blobs: list[str]  # digests of versions whose blob is complete

    @property
    def num_documents(self) -> int:
        return len(self.records) + len(self.same_records) + len(self.versions) + len(self.same_versions)


class _NoFence:
    """The server holds the lock, and looks itself at what is missing here."""

    is_sole = False

    def lock(self) -> None: ...

    def close(self) -> None: ...

    def check(self) -> None: ...


def main() -> None:
    """Look at what the server wants to know, and end."""
    gc.disable()  # what is made is gone with its frame
    os.chdir(sys.argv[1])  # the kernel has less of each path to walk
    store = DirectoryStore(Path(), fence=_NoFence())
    for frame in frames(store, read_frame(sys.stdin.buffer) or ()):
        write_frame(sys.stdout.buffer, tuple(frame))


def frames(store: DirectoryStore, names: Iterable[KnownTags]) -> Iterator[Frame]:
    """What is found of the names, in their order."""
    frame, lists = _new_frame(), ModuleLists()
    for name in names:
        _look(store, name, frame, lists)
        frame.num_names[0] += 1
        if frame.num_documents >= _FRAME_SIZE:
            frame.lists.extend(lists)
            yield frame
            frame, lists = _new_frame(), ModuleLists()
    frame.lists.extend(lists)
    yield frame


def _new_frame() -> Frame:
    return Frame([0], [], [], [], [], [], [])


def _look(store: DirectoryStore, name: KnownTags, frame: Frame, lists: ModuleLists) -> None:
    adapter_id, known_tag, known_versions = name
    digests: Iterable[str]
    try:
        document, tag = read_document(store, record_key(adapter_id), known_tag)
        if tag == known_tag:
            frame.same_records.append(adapter_id)
            digests = [digest for digest, _ in known_versions]
        else:
            stored = record_under(adapter_id, document)
            if stored.is_old:
                return
            frame.records.append(record_entry(adapter_id, tag, stored))
            digests = stored.digests
    except (OSError, ValueError):
        return
    known_tags = dict(known_versions)
    for digest in digests:
        try:
            known_tag = known_tags.get(digest, "")
            document, tag = read_document(store, version_key(adapter_id, digest), known_tag)
            if tag == known_tag:
                frame.same_versions.append((adapter_id, digest))
            else:
                version = version_under(digest, document)
                frame.versions.append(version_entry(adapter_id, tag, version, lists))
            if store.has(manifest_key(digest)):
                frame.blobs.append(digest)
        except (OSError, ValueError):
            continue


def read_frame(file: BinaryIO) -> Any:
    """The next values; None at the end, also where it comes too early."""
    header = _read(file, FRAME_LENGTH.size)
    if len(header) < FRAME_LENGTH.size:
        return None
    (size_bytes,) = FRAME_LENGTH.unpack(header)
    data = _read(file, size_bytes)
    return marshal.loads(data) if len(data) == size_bytes else None


def _read(file: BinaryIO, size_bytes: int) -> bytes:
    """So many bytes, fewer at the end. The file may be without a buffer."""
    data = file.read(size_bytes)
    while 0 < len(data) < size_bytes and (more := file.read(size_bytes - len(data))):
        data += more
    return data


def write_frame(file: BinaryIO, values: Any) -> None:
    """Send values. Raises BrokenPipeError where nobody reads."""
    data = marshal.dumps(values)
    file.write(FRAME_LENGTH.pack(len(data)))
    file.write(data)
    file.flush()


if __name__ == "__main__":
    try:
        main()
    except BrokenPipeError:  # the server does not want the rest
        sys.stderr.close()
