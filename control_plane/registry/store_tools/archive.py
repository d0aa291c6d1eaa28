"""Adapters in one file, to carry them from one store to another: a tar archive that is written and read as a stream.

    motet-store.json                   {"format": 1, "adapters": [names]}
    adapters/ID.json                   records, as the store has them
    versions/ID/DIGEST.json            their versions
    blobs/DIGEST/manifest.json         then the blob's files, 00000.safetensors and so on
    end.json                           {"members": N}: an archive without it was cut off

Nothing of an archive is registered before all of it was read and every hash was compared.
"""

from __future__ import annotations

import hashlib
import io
import json
import tarfile
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, BinaryIO

from contract.ids import is_adapter_id, is_digest
from control_plane.registry.store.artifact_store import ArtifactStore
from control_plane.registry.store_tools.inspection import (
    StoredAdapter,
    StoredFile,
    WrongDocument,
    files_of,
    parse_adapter,
    read_adapter,
)

ARCHIVE_FORMAT = 1
_HEADER, _END = "motet-store.json", "end.json"
_COPY_BYTES = 4 << 20  # in memory at a time
_MAX_DOCUMENT_BYTES = 64 << 20
_SHOWN = 10  # names in a message

OnBlob = Callable[[str, int], None]  # digest and size in bytes of one that is done


class WrongArchive(ValueError):
    """The archive cannot be used; says why. Nothing of it was registered."""


class NameTaken(ValueError):
    """The store has other adapters under names of the archive. Nothing was changed."""


@dataclass(frozen=True, slots=True)
class Carried:
    """What one export or import did."""

    adapters: tuple[str, ...]  # written
    present: tuple[str, ...]  # the store had them already, just the same
    num_blobs: int  # written, or whole in the store already
    size_bytes: int  # of these blobs


def export(store: ArtifactStore, names: Sequence[str], target: BinaryIO, on_blob: OnBlob = lambda *_: None) -> Carried:
    """Write these adapters, all if there are none, with every byte checked.

    Raises WrongDocument, FileNotFoundError (deleted meanwhile) and MotetError; what was written until then has no end.
    """
    store.format.check()
    stored = store.list_names(cleans=False).records
    if missing := [name for name in names if name not in stored]:
        raise WrongDocument(f"there is no adapter {missing[0]!r} in the store")
    adapters = [_read(store, name) for name in (sorted(set(names)) or stored)]
    digests = sorted({digest for adapter in adapters for digest in adapter.digests})
    with tarfile.open(fileobj=target, mode="w|") as tar:
        out = _Writer(tar)
        header = {"format": ARCHIVE_FORMAT, "adapters": [adapter.adapter_id for adapter in adapters]}
        out.add(_HEADER, json.dumps(header).encode())
        for adapter in adapters:
            out.add(f"adapters/{adapter.adapter_id}.json", adapter.record)
            for digest, document in adapter.versions.items():
                out.add(f"versions/{adapter.adapter_id}/{digest}.json", document)
        size_bytes = 0
        for digest in digests:
            size_bytes += (size := _export_blob(store, digest, out))
            on_blob(digest, size)
        out.add(_END, json.dumps({"members": out.num_members}).encode())
    return Carried(tuple(adapter.adapter_id for adapter in adapters), (), len(digests), size_bytes)


def _read(store: ArtifactStore, name: str) -> StoredAdapter:
    try:
        return read_adapter(store, name)
    except WrongDocument as error:
        raise WrongDocument(f"adapter {name}: {error}; export the others by their names") from error


def _export_blob(store: ArtifactStore, digest: str, out: _Writer) -> int:
    try:
        manifest = store.read_manifest(digest)
    except FileNotFoundError as error:
        raise WrongDocument(f"blob {digest} is not there; `motet store verify` names its adapter") from error
    files = files_of(digest, manifest)
    out.add(f"blobs/{digest}/manifest.json", manifest)
    for file in files:
        if not store.is_whole_chunk(digest, file.index, file.size_bytes, file.sha256):
            raise WrongDocument(f"blob {digest}, file {file.index} is damaged; `motet store verify` names its adapter")
        out.add_stream(_name_of(digest, file), file.size_bytes, _StoredStream(store, digest, file))
    return sum(file.size_bytes for file in files)


def _name_of(digest: str, file: StoredFile) -> str:
    return f"blobs/{digest}/{file.index:05d}.safetensors"


class _Writer:
    """Members of a tar archive, counted. They say nothing of who made them and when: equal stores give equal files."""

    def __init__(self, tar: tarfile.TarFile) -> None:
        self._tar = tar
        self.num_members = 0

    def add(self, name: str, content: bytes) -> None:
        self.add_stream(name, len(content), io.BytesIO(content))

    def add_stream(self, name: str, size_bytes: int, content: io.BufferedIOBase | BinaryIO) -> None:
        member = tarfile.TarInfo(name)
        member.size = size_bytes
        self._tar.addfile(member, content)
        self.num_members += 1


class _StoredStream(io.BufferedIOBase):
    """A file of a blob, read from the store as it is needed."""

    def __init__(self, store: ArtifactStore, digest: str, file: StoredFile) -> None:
        self._store, self._digest, self._file = store, digest, file
        self._position = 0

    def read(self, size: int | None = -1, /) -> bytes:
        left = self._file.size_bytes - self._position
        count = left if size is None or size < 0 else min(size, left)
        data = self._store.read_range(self._digest, self._file.index, self._position, count) if count else b""
        self._position += len(data)
        return data


@dataclass
class _Arrived:
    """What was read of an archive so far."""

    names: tuple[str, ...]  # of the header
    records: dict[str, bytes] = field(default_factory=dict)
    versions: dict[str, dict[str, bytes]] = field(default_factory=dict)  # by adapter id and digest
    new: dict[str, StoredAdapter] = field(default_factory=dict)  # to be registered
    present: list[str] = field(default_factory=list)  # registered already, just the same
    wanted: frozenset[str] = frozenset()  # digests of the new ones
    sizes: dict[str, int] = field(default_factory=dict)  # blobs that are whole, bytes


def import_archive(
    store: ArtifactStore, source: BinaryIO, names: Sequence[str] = (), on_blob: OnBlob = lambda *_: None
) -> Carried:
    """Register what an archive has, or these names of it. The store is locked by the caller.

    Raises WrongArchive, NameTaken and MotetError: then nothing is registered, and what was written of blobs is removed
    by the next start of a server, or by `motet store gc`.
    """
    try:
        with tarfile.open(fileobj=source, mode="r|") as tar:
            arrived = _read_archive(store, _Reader(tar), names, on_blob)
    except tarfile.TarError as error:
        raise WrongArchive(f"the file is not a whole tar archive: {error}") from error
    for adapter in arrived.new.values():
        for digest, document in adapter.versions.items():
            store.write_version(adapter.adapter_id, digest, document)
    for digest in arrived.wanted:
        if not store.renew_claim(digest):
            raise WrongArchive(f"another server deleted blob {digest} meanwhile; import the archive again")
    for adapter in arrived.new.values():
        store.write_record(adapter.adapter_id, adapter.record, expected=lambda document: document is None)
    return Carried(tuple(arrived.new), tuple(arrived.present), len(arrived.sizes), sum(arrived.sizes.values()))


class _Reader:
    """The members of an archive, one after the other."""

    def __init__(self, tar: tarfile.TarFile) -> None:
        self._tar = tar
        self.num_members = 0
        self._size_bytes = 0

    def next(self) -> str:
        """The name of the next member; its content is what is read then. Raises WrongArchive at the end."""
        member = self._tar.next()
        if member is None:
            raise WrongArchive(f"the archive was cut off after {self.num_members} members; export it again")
        if not member.isreg():
            raise WrongArchive(f"{member.name!r} is not a file; this is not an archive of `motet store export`")
        content = self._tar.extractfile(member)
        assert content is not None, "a regular member has content"
        self.content, self._size_bytes = content, member.size
        self.num_members += 1
        return member.name

    def document(self, name: str) -> bytes:
        """The whole content of the present member."""
        if self._size_bytes > _MAX_DOCUMENT_BYTES:
            raise WrongArchive(f"{name} has {self._size_bytes} bytes; a document has at most {_MAX_DOCUMENT_BYTES}")
        return self.content.read()

    def copy(self, name: str, file: StoredFile, target: IO[bytes]) -> None:
        """Copy the present member. Raises WrongArchive unless it is that file."""
        if self._size_bytes != file.size_bytes:  # before a byte is copied: a sparse member may claim any size
            raise WrongArchive(
                f"{name} has {self._size_bytes} bytes and should have {file.size_bytes}; export it again"
            )
        found = hashlib.sha256()
        while data := self.content.read(_COPY_BYTES):
            found.update(data)
            target.write(data)
        if found.hexdigest() != file.sha256:
            raise WrongArchive(f"{name} is damaged; export it again")


def _read_archive(store: ArtifactStore, reader: _Reader, names: Sequence[str], on_blob: OnBlob) -> _Arrived:
    arrived = _Arrived(_read_header(reader))
    if missing := [name for name in names if name not in arrived.names]:
        raise WrongArchive(f"there is no adapter {missing[0]!r} in the archive")
    name = _read_documents(reader, arrived)
    _compare(store, arrived, frozenset(names or arrived.names))
    while name != _END:
        name = _read_blob(store, reader, name, arrived, on_blob)
    _check_end(reader, _json(reader.document(_END), _END))
    if lacking := sorted(arrived.wanted - arrived.sizes.keys()):
        raise WrongArchive(f"blob {lacking[0]} is not in the archive; export it again")
    return arrived


def _read_header(reader: _Reader) -> tuple[str, ...]:
    name = reader.next()
    if name != _HEADER:
        raise WrongArchive(f"it begins with {name!r}; this is not an archive of `motet store export`")
    header = _json(reader.document(name), name)
    found = header.get("format")
    if found != ARCHIVE_FORMAT:
        raise WrongArchive(
            f"the archive has format {found!r}, and this version of Motet knows {ARCHIVE_FORMAT}; use a newer version"
        )
    names = header.get("adapters")
    if not isinstance(names, list) or not all(isinstance(each, str) and is_adapter_id(each) for each in names):
        raise WrongArchive(f"{name} lists no adapters")
    return tuple(names)


def _check_end(reader: _Reader, document: dict[str, object]) -> None:
    if document.get("members") != reader.num_members - 1:
        raise WrongArchive(
            f"the archive has {reader.num_members - 1} members and should have {document.get('members')!r}; "
            "export it again"
        )


def _read_documents(reader: _Reader, arrived: _Arrived) -> str:
    """Read records and versions; the name of the member after them."""
    while True:
        name = reader.next()
        match name.removesuffix(".json").split("/"):
            case ["adapters", adapter_id] if adapter_id in arrived.names:
                arrived.records[adapter_id] = reader.document(name)
            case ["versions", adapter_id, digest] if adapter_id in arrived.names and is_digest(digest):
                arrived.versions.setdefault(adapter_id, {})[digest] = reader.document(name)
            case _:
                return name


def _compare(store: ArtifactStore, arrived: _Arrived, selected: frozenset[str]) -> None:
    """Which adapters are new to the store. Raises WrongArchive and NameTaken."""
    taken = []
    for name in filter(selected.__contains__, arrived.names):
        if name not in arrived.records:
            raise WrongArchive(f"the record of adapter {name} is not in the archive; export it again")
        try:
            adapter = parse_adapter(name, arrived.records[name], _reader_of(arrived.versions.get(name, {})))
        except WrongDocument as error:
            raise WrongArchive(f"adapter {name}: {error}") from error
        try:
            is_same = _is_same(read_adapter(store, name), adapter)
        except FileNotFoundError:
            arrived.new[name] = adapter
            continue
        except WrongDocument:
            is_same = False
        if is_same:
            arrived.present.append(name)
        else:
            taken.append(name)
    if taken:
        more = f" and {len(taken) - _SHOWN} more" if len(taken) > _SHOWN else ""
        raise NameTaken(
            f"the store has other adapters under these names: {', '.join(taken[:_SHOWN])}{more}; delete them there, or "
            "import the others by their names"
        )
    arrived.wanted = frozenset(digest for adapter in arrived.new.values() for digest in adapter.digests)


def _reader_of(documents: dict[str, bytes]) -> Callable[[str], bytes]:
    def read(digest: str) -> bytes:
        if digest not in documents:
            raise FileNotFoundError(digest)
        return documents[digest]

    return read


def _is_same(one: StoredAdapter, other: StoredAdapter) -> bool:
    return one.record == other.record and dict(one.versions) == dict(other.versions)


def _read_blob(store: ArtifactStore, reader: _Reader, name: str, arrived: _Arrived, on_blob: OnBlob) -> str:
    """Store the blob whose manifest is the present member; the name of the member after its files."""
    match name.split("/"):
        case ["blobs", digest, "manifest.json"] if is_digest(digest):
            pass
        case _:
            raise WrongArchive(f"{name!r} has no place there; this is not an archive of `motet store export`")
    manifest = reader.document(name)
    try:
        files = files_of(digest, manifest)
    except WrongDocument as error:
        raise WrongArchive(f"blob {digest}: {error}; export it again") from error
    is_wanted = digest in arrived.wanted
    if is_wanted:
        store.claim_blob(digest)
    for file in files:
        expected = _name_of(digest, file)
        if (name := reader.next()) != expected:
            raise WrongArchive(f"{name!r} lies where {expected} should be; export it again")
        with tempfile.NamedTemporaryFile(prefix="motet-import-") as copied:
            reader.copy(name, file, copied)
            copied.flush()
            if is_wanted and not store.is_whole_chunk(digest, file.index, file.size_bytes, file.sha256):
                store.put_chunk(digest, file.index, Path(copied.name))
    if is_wanted:
        store.put_manifest(digest, manifest)
        arrived.sizes[digest] = sum(file.size_bytes for file in files)
        on_blob(digest, arrived.sizes[digest])
    return reader.next()


def _json(raw: bytes, name: str) -> dict[str, object]:
    try:
        found = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise WrongArchive(f"{name} is not JSON: {error}") from error
    if not isinstance(found, dict):
        raise WrongArchive(f"{name} is not a JSON object")
    return found
