"""A directory as the storage of a store: whole files, and never another directory than the one that was opened."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from control_plane.directory_lock import DirectoryAway
from control_plane.registry.store.store_files import LocalFiles, StoreLocked


@pytest.fixture
def files(tmp_path: Path) -> LocalFiles:
    opened = LocalFiles(tmp_path / "store")
    opened.lock()
    opened.write("adapters/a.json", b"a")
    return opened


def test_files_are_written_read_in_parts_moved_and_deleted(files: LocalFiles, tmp_path: Path) -> None:
    (tmp_path / "chunk").write_bytes(b"0123456789")
    files.write_file("blobs/d/0", tmp_path / "chunk")
    assert [files.read_range("blobs/d/0", start, 4) for start in (0, 4, 8, 12)] == [b"0123", b"4567", b"89", b""]
    files.move("adapters/a.json", "adapters/a.deleting")
    assert files.names("adapters") == ["a.deleting"] and files.read("adapters/a.deleting") == b"a"
    files.delete("adapters/a.deleting")
    files.delete("adapters/a.deleting")  # a missing one is fine
    files.delete_tree("blobs")
    files.delete_tree("blobs")
    assert files.names("blobs") == [] and not files.exists("blobs/d/0")
    with pytest.raises(FileNotFoundError):
        files.read("blobs/d/0")
    with pytest.raises(StoreLocked, match="in use by another control plane"):
        LocalFiles(files.root).lock()


MUTATIONS: dict[str, Callable[[LocalFiles], object]] = {
    "write": lambda files: files.write("adapters/b.json", b"b"),
    "write below a new directory": lambda files: files.write("blobs/d/manifest.json", b"b"),
    "write a file": lambda files: files.write_file("blobs/d/0", Path(__file__)),
    "move": lambda files: files.move("adapters/a.json", "adapters/a.deleting"),
    "delete": lambda files: files.delete("adapters/a.json"),
    "delete a tree": lambda files: files.delete_tree("adapters"),
}
LOOKS: dict[str, Callable[[LocalFiles], object]] = {
    "read": lambda files: files.read("adapters/a.json"),
    "read a part": lambda files: files.read_range("adapters/a.json", 0, 1),
    "exists": lambda files: files.exists("adapters/a.json"),
    "names": lambda files: files.names("adapters"),
}


@pytest.mark.parametrize("call", [*MUTATIONS.values(), *LOOKS.values()], ids=[*MUTATIONS, *LOOKS])
@pytest.mark.parametrize("is_replaced", [False, True], ids=["gone", "an empty mount point"])
def test_a_store_that_is_away_is_neither_made_anew_nor_called_empty(
    files: LocalFiles, tmp_path: Path, call: Callable[[LocalFiles], object], is_replaced: bool
) -> None:
    files.root.rename(tmp_path / "away")
    if is_replaced:
        files.root.mkdir()
    with pytest.raises(DirectoryAway):
        call(files)
    assert list(tmp_path.glob("store/*")) == []
    assert files.root.exists() is is_replaced
    if is_replaced:
        files.root.rmdir()
    (tmp_path / "away").rename(files.root)
    assert files.read("adapters/a.json") == b"a"
    call(files)


def test_a_store_that_leaves_during_a_write_makes_the_write_fail(
    files: LocalFiles, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file was written, and lies where nobody will look for it."""
    fsync = os.fsync

    def unmount_and_sync(descriptor: int) -> None:
        fsync(descriptor)
        if files.root.exists():
            files.root.rename(tmp_path / "away")

    monkeypatch.setattr(os, "fsync", unmount_and_sync)
    with pytest.raises(OSError):
        files.write("adapters/b.json", b"b")
    assert not files.root.exists()


def test_a_full_disk_leaves_the_old_file_and_no_other(files: LocalFiles, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "no space")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(OSError, match="no space"):
            files.write("adapters/a.json", b"new")
    assert files.names("adapters") == ["a.json"] and files.read("adapters/a.json") == b"a"
