"""A directory as the storage of a store: whole files, and never another directory than the one that was opened."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from control_plane.directory_lock import DirectoryAway
from control_plane.registry.store.directory_store import DirectoryStore
from control_plane.registry.store.store import StoreLocked, replace


@pytest.fixture
def files(tmp_path: Path) -> DirectoryStore:
    opened = DirectoryStore(tmp_path / "store")
    opened.fence.lock()
    opened.put_if_absent("adapters/a.json", b"a")
    return opened


def test_a_second_control_plane_is_refused_and_leftovers_of_a_killed_one_go(files: DirectoryStore) -> None:
    second = DirectoryStore(files.root)
    with pytest.raises(StoreLocked, match="in use by another control plane"):
        second.fence.lock()
    (files.root / "tmp" / "half").write_bytes(b"x")
    files.fence.close()
    second.fence.lock()
    assert not (files.root / "tmp").exists()
    replace(second, "adapters/a.json", b"b")
    assert list((files.root / "tmp").iterdir()) == []
    second.fence.close()


MUTATIONS: dict[str, Callable[[DirectoryStore], object]] = {
    "write": lambda files: replace(files, "adapters/b.json", b"b"),
    "write below a new directory": lambda files: replace(files, "blobs/d/manifest.json", b"b"),
    "write a file": lambda files: replace(files, "blobs/d/0", Path(__file__)),
    "delete": lambda files: files.delete("adapters/a.json"),
}
LOOKS: dict[str, Callable[[DirectoryStore], object]] = {
    "get": lambda files: files.get("adapters/a.json"),
    "get a part": lambda files: files.get("adapters/a.json", 0, 1),
    "head": lambda files: files.head("adapters/a.json"),
    "list": lambda files: files.list("adapters"),
}


@pytest.mark.parametrize("call", [*MUTATIONS.values(), *LOOKS.values()], ids=[*MUTATIONS, *LOOKS])
@pytest.mark.parametrize("is_replaced", [False, True], ids=["gone", "an empty mount point"])
def test_a_store_that_is_away_is_neither_made_anew_nor_called_empty(
    files: DirectoryStore, tmp_path: Path, call: Callable[[DirectoryStore], object], is_replaced: bool
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
    assert files.get("adapters/a.json")[0] == b"a"
    call(files)


def test_a_store_that_leaves_during_a_write_makes_the_write_fail(
    files: DirectoryStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file was written, and lies where nobody will look for it."""
    fsync = os.fsync

    def unmount_and_sync(descriptor: int) -> None:
        fsync(descriptor)
        if files.root.exists():
            files.root.rename(tmp_path / "away")

    monkeypatch.setattr(os, "fsync", unmount_and_sync)
    with pytest.raises(OSError):
        files.put_if_absent("adapters/b.json", b"b")
    assert not files.root.exists()


def test_a_full_disk_leaves_the_old_file_and_no_other(files: DirectoryStore, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "no space")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(OSError, match="no space"):
            replace(files, "adapters/a.json", b"new")
    assert [entry.name for entry in files.list("adapters")] == ["a.json"] and files.get("adapters/a.json")[0] == b"a"
    assert list((files.root / "tmp").iterdir()) == []
