"""Object stores as the storage of a store, on fsspec's one in memory."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import fsspec  # type: ignore[import-untyped]
import pytest
from fsspec.implementations.memory import MemoryFileSystem  # type: ignore[import-untyped]

from control_plane.errors import StoreUnavailable
from control_plane.registry.store.artifact_store import ArtifactStore
from control_plane.registry.store.remote_files import (
    LEFTOVER_AGE,
    RemoteFiles,
    StoreUrlError,
    has_own_creation,
    open_files,
)
from control_plane.registry.store.store_files import LocalFiles, StoreLocked
from control_plane.registry.store.store_lease import LeaseLost, StoreLease


class PlainFiles(MemoryFileSystem):  # type: ignore[misc]  # fsspec is untyped
    """A file system that cannot write "only where no file is", as most cannot."""

    pipe_file = fsspec.AbstractFileSystem.pipe_file


class IgnoresTheCondition(MemoryFileSystem):  # type: ignore[misc]
    """An object store that takes the request and writes all the same, as some that speak S3's protocol do."""

    def pipe_file(self, path: str, value: bytes, mode: str = "overwrite", **kwargs: Any) -> None:
        super().pipe_file(path, value)


class KnowsNoCondition(MemoryFileSystem):  # type: ignore[misc]
    """An older package."""

    def pipe_file(self, path: str, value: bytes) -> None:
        super().pipe_file(path, value)


class OwnErrors(MemoryFileSystem):  # type: ignore[misc]
    """A file system whose library has errors of its own."""

    def cat_file(self, path: str, start: int | None = None, end: int | None = None, **kwargs: Any) -> bytes:
        raise RuntimeError("EndpointConnectionError: no route to bucket")


@pytest.fixture
def root() -> Iterator[str]:
    name = f"bucket-{uuid.uuid4().hex}"
    yield name
    if (memory := MemoryFileSystem()).exists(name):
        memory.rm(name, recursive=True)


@pytest.fixture
def lease(root: str) -> StoreLease:
    return StoreLease(RemoteFiles(MemoryFileSystem(), root))


@pytest.fixture
def files(root: str, lease: StoreLease) -> Iterator[RemoteFiles]:
    opened = RemoteFiles(MemoryFileSystem(), root, lease=lease)
    opened.lock()
    yield opened
    opened.close()


def test_files_are_written_read_in_parts_moved_and_deleted(files: RemoteFiles, tmp_path: Path) -> None:
    (tmp_path / "chunk").write_bytes(b"0123456789")
    files.write_file("blobs/d/0", tmp_path / "chunk")
    assert [files.read_range("blobs/d/0", start, 4) for start in (0, 4, 8)] == [b"0123", b"4567", b"89"]
    files.write("adapters/a.json", b"a")
    files.move("adapters/a.json", "adapters/a.deleting")
    assert files.names("adapters") == ["a.deleting"] and files.read("adapters/a.deleting") == b"a"
    assert files.exists("adapters/a.deleting") and not files.exists("adapters/a.json")
    files.delete("adapters/a.deleting")
    files.delete("adapters/a.deleting")
    files.delete_tree("blobs")
    files.delete_tree("blobs")
    assert files.names("blobs") == []
    with pytest.raises(FileNotFoundError):
        files.read("blobs/d/0")


def test_a_second_control_plane_on_one_bucket_is_refused(files: RemoteFiles, lease: StoreLease, root: str) -> None:
    second = StoreLease(RemoteFiles(MemoryFileSystem(), root), wait=lambda timeout_s: lease.renew())
    with pytest.raises(StoreLocked, match="in use: another control plane uses the store"):
        RemoteFiles(MemoryFileSystem(), root, lease=second).lock()


def test_a_control_plane_that_lost_the_store_changes_nothing(files: RemoteFiles, lease: StoreLease, root: str) -> None:
    files.write("adapters/a.json", b"mine")
    second = RemoteFiles(MemoryFileSystem(), root, is_exclusive=True)
    second.lock()
    second.write("adapters/a.json", b"theirs")
    lease.renew()
    for change in (
        lambda: files.write("adapters/a.json", b"mine"),
        lambda: files.write_file("adapters/a.json", Path(__file__)),
        lambda: files.move("adapters/a.json", "adapters/a.deleting"),
        lambda: files.delete("adapters/a.json"),
        lambda: files.delete_tree("adapters"),
    ):
        with pytest.raises(LeaseLost):
            change()
    assert files.read("adapters/a.json") == b"theirs"  # reading harms nobody
    with pytest.raises(StoreUnavailable, match="does not hold the artifact store: another control plane took"):
        ArtifactStore(files).write_record("a", b"mine")
    second.close()


def test_a_file_system_without_atomic_creation_needs_the_operators_word(root: str) -> None:
    assert has_own_creation(MemoryFileSystem()) and not has_own_creation(PlainFiles())
    for filesystem in (PlainFiles(), IgnoresTheCondition()):
        with pytest.raises(StoreLocked, match=r"cannot keep two control planes apart: .*say so with --exclusive-store"):
            RemoteFiles(filesystem, root).lock()
    with pytest.raises(OSError, match="unexpected keyword"):
        RemoteFiles(KnowsNoCondition(), root).lock()
    for filesystem in (PlainFiles(), IgnoresTheCondition(), KnowsNoCondition()):
        said = RemoteFiles(filesystem, root, is_exclusive=True)
        said.lock()
        said.write("adapters/a.json", b"a")
        assert said.names("leases") == []
        said.close()


def test_what_changed_lately_may_be_written_still(files: RemoteFiles, monkeypatch: pytest.MonkeyPatch) -> None:
    files.write("blobs/d/0", b"0")
    assert files.may_be_written("blobs/d")
    ages = {"old": LEFTOVER_AGE + timedelta(minutes=1), "new": LEFTOVER_AGE - timedelta(minutes=1)}
    for name, age in ages.items():
        # Some file systems tell times without a zone, in UTC.
        modified = (datetime.now(UTC) - age).replace(tzinfo=None)
        monkeypatch.setattr(MemoryFileSystem, "modified", lambda self, path, modified=modified: modified)
        assert files.may_be_written("blobs/d") is (name == "new")

    def unknown(self: Any, path: str) -> datetime:
        raise NotImplementedError

    monkeypatch.setattr(MemoryFileSystem, "modified", unknown)
    assert files.may_be_written("blobs/d")


def test_errors_of_a_library_are_failures_of_the_store(root: str) -> None:
    files = RemoteFiles(OwnErrors(), root)
    with pytest.raises(OSError, match="no route to bucket"):
        files.read("x")
    with pytest.raises(StoreUnavailable, match=r"does not respond \(read\)"):
        ArtifactStore(files).read_manifest("0" * 64)


@pytest.mark.parametrize(
    ("url", "words"),
    [("s3://bucket/path", "^s3://: .*s3fs.*; install it where"), ("nosuch://x", "^nosuch://: .*nosuch; give a dir")],
)
def test_a_url_that_cannot_be_opened_says_what_is_missing(url: str, words: str) -> None:
    with pytest.raises(StoreUrlError, match=words):
        open_files(url)


def test_paths_and_file_urls_are_directories(tmp_path: Path) -> None:
    for url in (str(tmp_path), f"file://{tmp_path}"):
        opened = open_files(url)
        assert isinstance(opened, LocalFiles) and opened.root == tmp_path
