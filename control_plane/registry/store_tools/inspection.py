"""Reads a store and changes nothing: which adapters it has, whether every byte is right, which blobs no name uses.

Works beside a running server: documents and blobs appear as a whole. What is deleted while it is read is found missing,
so look twice before you call it wrong.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from contract.ids import is_digest
from control_plane.host_cache.packed import read_layout
from control_plane.registry.records import AdapterState
from control_plane.registry.store.artifact_store import ArtifactStore
from control_plane.registry.store.record_documents import decode_record, decode_version

ReadVersion = Callable[[str], bytes]  # a version's document by digest; FileNotFoundError if there is none


@dataclass(frozen=True, slots=True)
class StoredAdapter:
    """The documents of one name, as they are stored."""

    adapter_id: str
    record: bytes
    versions: Mapping[str, bytes]  # by digest; empty where the record holds them itself, as old ones do
    digests: tuple[str, ...]  # of its versions, newest first


@dataclass(frozen=True, slots=True)
class StoredFile:
    """One file of a blob beside its manifest."""

    index: int
    size_bytes: int
    sha256: str


@dataclass(frozen=True, slots=True)
class Problem:
    """What is wrong with one thing in the store."""

    resource: str  # adapters/ID or blobs/DIGEST
    text: str


@dataclass(frozen=True, slots=True)
class Strays:
    """What no name uses."""

    blobs: tuple[str, ...]  # digests
    versions: tuple[str, ...]  # adapter ids
    # Adapter ids whose record, or a version of it, cannot be read: while there is one, whole blobs are kept.
    unreadable: tuple[str, ...]


@dataclass
class Checked:
    """What `problems` has looked at so far."""

    num_adapters: int = 0
    num_versions: int = 0
    num_blobs: int = 0
    size_bytes: int = 0  # of the blobs


class WrongDocument(ValueError):
    """A document of the store that cannot be used; says why."""


def read_adapter(store: ArtifactStore, adapter_id: str) -> StoredAdapter:
    """The documents of a name, checked. Raises FileNotFoundError if there is no such name, and WrongDocument."""
    raw, _ = store.read_record(adapter_id)
    return parse_adapter(adapter_id, raw, lambda digest: store.read_version(adapter_id, digest)[0])


def parse_adapter(adapter_id: str, raw: bytes, read_version: ReadVersion) -> StoredAdapter:
    """A record with its versions, checked. Raises WrongDocument."""
    try:
        stored = decode_record(raw)
    except ValueError as error:
        raise WrongDocument(f"its record cannot be read: {error}") from error
    if stored.record.adapter_id != adapter_id:
        raise WrongDocument(f"its record is that of {stored.record.adapter_id!r}")
    if not all(map(is_digest, stored.digests)):
        raise WrongDocument("its record has a value that is not a digest")
    if stored.is_old:
        return StoredAdapter(adapter_id, raw, {}, stored.digests)
    versions = {}
    for digest in stored.digests:
        try:
            versions[digest] = read_version(digest)
            if decode_version(versions[digest]).digest != digest:
                raise ValueError("it is the document of another version")
        except FileNotFoundError as error:
            raise WrongDocument(f"the document of its version {digest} is missing") from error
        except ValueError as error:
            raise WrongDocument(f"the document of its version {digest} cannot be read: {error}") from error
    return StoredAdapter(adapter_id, raw, versions, stored.digests)


def files_of(digest: str, manifest: bytes) -> Sequence[StoredFile]:
    """The files of a blob by its manifest: chunks, then documents beside them. Raises WrongDocument."""
    layout = read_layout(digest, manifest)
    if layout is None:
        raise WrongDocument("its manifest is not the one of this digest")
    hashes = list(zip(layout.sizes, layout.hashes, strict=True))
    hashes += [(entry["size_bytes"], entry["sha256"]) for entry in json.loads(manifest).get("companions", ())]
    return [StoredFile(index, size_bytes, sha256) for index, (size_bytes, sha256) in enumerate(hashes)]


def problems(store: ArtifactStore, names: Sequence[str], checked: Checked) -> Iterator[Problem]:
    """Read every byte of these names, of all if there are none, and give what is wrong. `checked` counts along."""
    stored = store.list_names(cleans=False)
    for name in [name for name in names if name not in stored.records]:
        yield Problem(f"adapters/{name}", "there is no such adapter in the store")
    digests: dict[str, str] = {}
    for name in stored.records if not names else [name for name in names if name in stored.records]:
        checked.num_adapters += 1
        try:
            adapter = read_adapter(store, name)
        except FileNotFoundError:
            yield Problem(f"adapters/{name}", "its record is gone: it was deleted meanwhile")
            continue
        except WrongDocument as error:
            yield Problem(f"adapters/{name}", str(error))
            continue
        checked.num_versions += len(adapter.digests)
        digests.update(dict.fromkeys(adapter.digests, name))
    for digest, name in digests.items():
        checked.num_blobs += 1
        yield from _problems_of_blob(store, digest, name, checked)


def _problems_of_blob(store: ArtifactStore, digest: str, name: str, checked: Checked) -> Iterator[Problem]:
    blob = f"blobs/{digest}"
    try:
        files = files_of(digest, store.read_manifest(digest))
    except FileNotFoundError:
        yield Problem(blob, f"it is not there, and adapter {name} has it; register these weights again")
        return
    except WrongDocument as error:
        yield Problem(blob, f"{error}; adapter {name} has it: register these weights again")
        return
    for file in files:
        checked.size_bytes += file.size_bytes
        if not store.is_whole_chunk(digest, file.index, file.size_bytes, file.sha256):
            yield Problem(
                blob, f"file {file.index} is missing or damaged; adapter {name} has it: register these weights again"
            )


def find_strays(store: ArtifactStore) -> Strays:
    """What a crash or a broken-off write left in the store."""
    stored = store.list_names(cleans=False)
    named, unreadable, whole = set[str](), list[str](), set[str]()
    for name in stored.records:
        try:
            found = decode_record(store.read_record(name)[0])
            if found.record.state is AdapterState.DELETING:
                continue
            read_adapter(store, name)
        except FileNotFoundError:
            continue
        except ValueError:
            unreadable.append(name)
            continue
        named.update(found.digests)
        whole.add(name)
    blobs = [
        digest for digest in stored.blobs if not store.has_blob(digest) or (digest not in named and not unreadable)
    ]
    versions = sorted({*stored.versions, *stored.deleting} - whole - set(unreadable))
    return Strays(tuple(blobs), tuple(versions), tuple(unreadable))
